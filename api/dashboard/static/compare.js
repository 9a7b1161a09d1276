// Curves of several runs over each other, by optimizer step.
import { Curve, LABELS, chart, positive, readJson } from "./curves.js";
import { measured } from "./numbers.js";

const root = document.getElementById("compare");
const scale = document.getElementById("scale");
const weight = document.getElementById("weight");
const series = document.getElementById("series");
const entries = [...root.querySelectorAll(".legend li")];
let curves = [];
let plot = null;

/** Bring the curves to the steps that any of them has: undefined where a curve has none, null where it has a gap. */
function joined() {
  const isLog = scale.value === "log";
  const tables = curves.flatMap((curve) => {
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
  const lines = curves.flatMap((_, number) => [
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

function hover(place) {
  entries.forEach((entry, number) => {
    const values = plot.data[2 * number + 1];
    let at = place ?? values.length - 1;
    while (place === null && at > 0 && (values[at] === null || values[at] === undefined)) at -= 1;
    entry.querySelector("[data-value]").textContent = measured(values[at]);
  });
}

async function read() {
  const name = series.value;
  const query = `/curve?series=${encodeURIComponent(name)}`;
  const found = await Promise.all(entries.map(async (one) => new Curve(await readJson(one.dataset.url + query))));
  if (series.value !== name) return;
  curves = found;
  draw();
  root.dataset.series = name;
  root.dataset.points = curves.map((curve) => curve.points).join(" ");
}

function begin() {
  read().catch((error) => (root.dataset.failed = error.message));
}

scale.addEventListener("change", draw);
weight.addEventListener("change", draw);
series.addEventListener("change", begin);
begin();
