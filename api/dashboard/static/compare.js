// Curves of several runs over each other, by optimizer step.
import { Curve, LABELS, chart, curveAddress, positive, readJson, untilRead } from "./curves.js";
import { measured } from "./numbers.js";

const root = document.getElementById("compare");
const scale = document.getElementById("scale");
const weight = document.getElementById("weight");
const series = document.getElementById("series");
const entries = [...root.querySelectorAll(".legend li")];
// The curve of each entry, null while it was not read.
let curves = entries.map(() => null);
let plot = null;
let turns = 0;

/** The curves that were read, each with the number of its entry. */
function known() {
  return curves.map((curve, number) => ({ curve, number })).filter(({ curve }) => curve);
}

/** Bring the curves to the steps that any of them has: undefined where a curve has none, null where it has a gap. */
function joined() {
  const isLog = scale.value === "log";
  const tables = known().flatMap(({ curve }) => {
    const average = Number(weight.value) > 0 ? curve.average(Number(weight.value)) : curve.value;
    return [
      [curve.step, isLog ? positive(curve.value) : curve.value],
      [curve.step, isLog ? positive(average) : average],
    ];
  });
  return uPlot.join(tables, tables.map(() => [1, 2]));
}

function draw() {
  if (plot) plot.destroy();
  const lines = known().flatMap(({ number }) => [
    { label: "raw", colour: number, width: 1, alpha: 0.3 },
    { label: "average", colour: number, width: 2 },
  ]);
  plot = chart(document.getElementById("loss-plot"), {
    label: LABELS[series.value] || series.value.replace(/^metric:/, ""),
    lines,
    isLog: scale.value === "log",
    marks: () => [],
    broken: () => [],
    onHover: hover,
    height: 360,
  });
  plot.setData(joined());
  hover(null);
}

function say(number, text) {
  entries[number].querySelector("[data-value]").textContent = text;
}

function hover(place) {
  known().forEach(({ number }, line) => {
    const values = plot.data[2 * line + 1];
    let at = place ?? values.length - 1;
    while (place === null && at > 0 && (values[at] === null || values[at] === undefined)) at -= 1;
    say(number, measured(values[at]));
  });
}

/** Read and draw the series that is chosen, until another is: each run's by itself, as one that is refused hides no other. */
function begin() {
  const turn = (turns += 1);
  const name = series.value;
  const isWanted = () => turn === turns;
  const found = entries.map(() => null);
  entries.forEach(async (entry, number) => {
    say(number, measured(null));
    const read = async (isAgain) => new Curve(await readJson(curveAddress(entry.dataset.url, name, !isAgain)));
    const curve = await untilRead(read, isWanted);
    if (!isWanted()) return;
    if (!curve) return say(number, "not read");
    found[number] = curve;
    curves = found;
    draw();
    root.dataset.series = name;
    root.dataset.points = curves.map((one) => (one ? one.points : "-")).join(" ");
  });
}

function redraw() {
  if (known().length) draw();
}

scale.addEventListener("change", redraw);
weight.addEventListener("change", redraw);
series.addEventListener("change", begin);
begin();
