// A run's page: the live curve, its marks and the run's standing. State is told as attributes of #curve.
import { Metrics, OWN_MS } from "./metrics.js";
import { Curve, LABELS, chart, curveAddress, positive, readJson, showState, unitOf, untilRead } from "./curves.js";
import { count, duration, measured, noun } from "./numbers.js";
import { MOST_ROWS, PointRows, perOf } from "./run_rows.js";
import { RunStream } from "./run_stream.js";
import { exact, timeElement } from "./times.js";
import { writeMarked } from "./tokens.js";

const MOST_LIVE_ENTRIES = 4000;
const MOST_TEXTS = 3;
const root = document.getElementById("curve");
const base = root.dataset.url;
const controls = {
  scale: document.getElementById("scale"),
  weight: document.getElementById("weight"),
  series: document.getElementById("series"),
  marks: document.getElementById("show-marks"),
  from: document.getElementById("from"),
  to: document.getElementById("to"),
  whole: document.getElementById("whole"),
};
const rows = new PointRows();
const marks = new Map();
let metrics = null;
let loss = null;
let other = null;
// The steps that are looked at, null for all, and the curves between them if the whole ones are coarser.
let part = null;
let closer = { loss: null, other: null };
let lossPlot = null;
let otherPlot = null;
const arrivals = new Set();
let isReadingLoss = false;
let isDue = false;

function shownMarks() {
  return controls.marks.checked ? [...marks.values()] : [];
}

function weight() {
  return Number(controls.weight.value);
}

function say(name, text) {
  const place = root.querySelector(`[data-say="${name}"]`);
  if (place) place.textContent = text;
}

function readout(place) {
  const shown = closer.loss || loss;
  if (!shown || !shown.step.length) return;
  const at = place === null || place === undefined ? shown.step.length - 1 : place;
  if (at >= shown.step.length) return;
  const average = lossPlot.data[2] ? lossPlot.data[2][at] : null;
  say("step", count(shown.step[at]));
  say("loss", shown.broken.includes(shown.step[at]) ? "not finite" : measured(shown.value[at]));
  say("average", measured(average));
  say("at", exact(shown.at[at]));
  const near = [...marks.values()].filter((mark) => Math.abs(mark.step - shown.step[at]) <= Math.max(shown.width, 1) - 1);
  const texts = near.slice(0, MOST_TEXTS).map((mark) => mark.text);
  if (near.length > MOST_TEXTS) texts.push(`${near.length - MOST_TEXTS} more in the table`);
  say("mark", texts.join(" · "));
}

function tell() {
  root.dataset.points = loss.points;
  root.dataset.lastStep = loss.lastStep;
  root.dataset.otherStep = other ? other.lastStep : 0;
  root.dataset.marks = marks.size;
  root.dataset.shown = loss.step.length;
  root.dataset.lastLoss = loss.value.length ? String(loss.value[loss.value.length - 1]) : "";
  say("points", `${count(loss.points)} ${noun(loss.points, "point")}`);
  const { width } = closer.loss || loss;
  root.dataset.width = width;
  root.dataset.part = part ? `${part.min}-${part.max}` : "";
  say("width", width > 1 ? `least and greatest of each ${width} steps` : "each step");
  root.classList.toggle("is-empty", loss.points === 0);
  const empty = root.querySelector("[data-empty]");
  if (empty) empty.hidden = loss.points > 0;
}

function draw() {
  isDue = false;
  const isLog = controls.scale.value === "log";
  const shown = closer.loss || loss;
  const values = isLog ? positive(shown.value) : shown.value;
  const average = shown.average(weight());
  paint(lossPlot, [shown.step, values, isLog ? positive(average) : average]);
  const beside = closer.other || other;
  if (otherPlot && beside) paint(otherPlot, [beside.step, beside.value]);
  tell();
  readout(lossPlot.cursor.idx);
  root.dataset.drawnStep = loss.lastStep;
}

/** Draw the data; new points leave the part that is looked at as it is. */
function paint(plot, data) {
  plot.setData(data, part === null);
  if (part) plot.setScale("x", part);
}

/** Look at a part of the steps, or at all of them, and read the curves there if the whole ones are coarser. */
function lookAt(next) {
  if (next && (!(next.max > next.min) || (part && part.min === next.min && part.max === next.max))) return;
  part = next;
  closer = { loss: null, other: null };
  controls.whole.hidden = !next;
  draw();
  readCloser("loss", "mean_loss", loss, true);
  if (other) readCloser("other", controls.series.value, other, true);
}

function readCloser(place, name, whole, isAsked) {
  if (!part || whole.width === 1) return;
  const wanted = part;
  readCurve(name, isAsked, part)
    .then((found) => {
      if (part !== wanted || (place === "other" && controls.series.value !== name)) return;
      closer[place] = found;
      drawSoon();
    })
    .catch(() => {});
}

function lookAtChosen(next) {
  controls.from.value = next ? next.min : "";
  controls.to.value = next ? next.max : "";
  lookAt(next);
}

function lookAtFields() {
  const { from, to } = controls;
  lookAt({ min: Math.floor(Number(from.value)), max: to.value ? Math.ceil(Number(to.value)) : loss.lastStep });
}

function drawSoon() {
  if (isDue) return;
  isDue = true;
  // A hidden page has no frames: its state is told all the same.
  if (document.hidden) draw();
  else requestAnimationFrame(draw);
}

function makeLossPlot() {
  if (lossPlot) lossPlot.destroy();
  lossPlot = chart(document.getElementById("loss-plot"), {
    label: root.dataset.per ? `Mean loss, by ${root.dataset.per}` : "Mean loss",
    lines: [
      { label: "raw", colour: 0, width: 1, alpha: 0.5 },
      { label: "average", colour: 0, width: 2.25 },
    ],
    isLog: controls.scale.value === "log",
    marks: shownMarks,
    broken: () => (closer.loss || loss).broken,
    onHover: readout,
    onPart: lookAtChosen,
    sync: "run",
  });
}

function makeOtherPlot() {
  if (otherPlot) otherPlot.destroy();
  const name = controls.series.value;
  const label = LABELS[name] || name.replace(/^metric:/, "");
  const unit = unitOf(name);
  otherPlot = chart(document.getElementById("other-plot"), {
    label: unit ? `${label}, ${unit}` : label,
    lines: [{ label, colour: 1, width: 1.5 }],
    isLog: false,
    marks: shownMarks,
    broken: () => (closer.other || other || { broken: [] }).broken,
    onHover: null,
    onPart: lookAtChosen,
    sync: "run",
    height: 200,
  });
}

/** Read a series, or a part of it, with the points that came meanwhile: the stream does not send them again. */
async function readCurve(name, isAsked, between) {
  const came = [];
  arrivals.add(came);
  // The average begins before the part, so that it is nearly the whole curve's.
  const runIn = Math.ceil(8 / (1 - weight()));
  const range = between ? `&begin=${Math.max(0, between.min - runIn)}&end=${between.max}` : "";
  try {
    const read = new Curve(await readJson(curveAddress(base, name, isAsked) + range));
    for (const point of came) if (!between || point.step <= between.max) append(read, name, point);
    return read;
  } finally {
    arrivals.delete(came);
  }
}

function append(curve, name, point) {
  if (!(name in LABELS)) return;
  const isBroken = name === "mean_loss" && point.loss_sum === null && point.loss_weight !== 0;
  curve.append(point.step, Date.parse(point.at) / 1000, point[name] ?? null, isBroken);
}

async function readOther(isAsked) {
  const name = controls.series.value;
  const found = await readCurve(name, isAsked);
  if (controls.series.value !== name) return;
  other = found;
  drawSoon();
  readCloser("other", name, other, isAsked);
}

/** Read the other series that was not read yet. */
function showOther(isAsked) {
  const name = controls.series.value;
  untilRead((isAgain) => readOther(isAsked && !isAgain), () => controls.series.value === name && !other);
}

/** Offer each of the user's own metrics as another series. */
function offerOwn(names) {
  const known = new Set([...controls.series.options].map((option) => option.value));
  for (const name of names.filter((one) => !known.has(`metric:${one}`))) {
    const option = document.createElement("option");
    option.value = `metric:${name}`;
    writeMarked(option, name);
    ownGroup().append(option);
  }
}

function ownGroup() {
  const there = controls.series.querySelector("optgroup");
  if (there) return there;
  const group = document.createElement("optgroup");
  group.label = "Your metrics";
  controls.series.append(group);
  return group;
}

/** Read the other series again if it is an own metric: no point of it comes by the stream. */
function followOwn() {
  if (!document.hidden && !(controls.series.value in LABELS)) readOther(false).catch(() => {});
}

function addPoints(points) {
  for (const came of arrivals) came.push(...points);
  for (const point of points) {
    if (metrics) metrics.add(point);
    append(loss, "mean_loss", point);
    if (other) append(other, controls.series.value, point);
    if (closer.loss && point.step <= part.max) append(closer.loss, "mean_loss", point);
    if (closer.other && point.step <= part.max) append(closer.other, controls.series.value, point);
  }
  rows.add(points);
  const per = points.length ? perOf(points[points.length - 1]) : "";
  if (per && !root.dataset.per) {
    root.dataset.per = per;
    makeLossPlot();
  }
  if (loss.step.length > MOST_LIVE_ENTRIES) readLoss().catch(() => {});
  drawSoon();
}

function addMarks(found) {
  for (const mark of found) {
    const isNew = !marks.has(mark.id);
    marks.set(mark.id, mark);
    if (isNew) addMarkRow(mark);
  }
  if (loss) drawSoon();
}

function addMarkRow(mark) {
  const list = document.getElementById("marks");
  if (!list || list.querySelector(`[data-mark="${CSS.escape(mark.id)}"]`)) return;
  const row = document.createElement("tr");
  row.dataset.mark = mark.id;
  row.dataset.kind = mark.kind;
  const step = document.createElement("td");
  step.className = "number";
  step.textContent = count(mark.step);
  const what = document.createElement("td");
  const dot = document.createElement("i");
  dot.className = "dot";
  dot.dataset.kind = mark.kind;
  what.append(dot, mark.text);
  const time = document.createElement("td");
  time.append(timeElement(mark.at));
  row.append(step, what, time);
  list.tBodies[0].prepend(row);
}

/** Show a text or an element in a field, or hide the field. */
function fill(name, shown) {
  const place = document.querySelector(`#waiting [data-field="${name}"]`);
  if (!place) return;
  place.replaceChildren(shown || "");
  const term = document.querySelector(`#waiting [data-of="${name}"]`);
  place.hidden = !shown;
  if (term) term.hidden = !shown;
}

function showStanding(standing) {
  // A service of an earlier version tells none.
  const own = standing.metrics ?? [];
  offerOwn(own);
  if (metrics) metrics.showOwn(own);
  showState(document.querySelector("[data-run-state] .state"), standing.state);
  const box = document.getElementById("waiting");
  const waiting = standing.waiting;
  box.hidden = !waiting.reason;
  box.dataset.reason = waiting.reason || "";
  fill("reason", waiting.reason ? waiting.words : "");
  fill("text", waiting.text);
  fill("since", waiting.since && timeElement(waiting.since));
  const ahead = waiting.ahead || {};
  const { bound_passes: bound, eta_seconds: eta } = ahead;
  fill("bound", bound != null ? `${count(bound)} ${noun(bound, "pass", "passes")}` : "");
  fill("eta", eta != null ? `about ${duration(eta)}` : "");
}

async function readLoss() {
  if (isReadingLoss) return;
  isReadingLoss = true;
  try {
    loss = await readCurve("mean_loss", false);
  } finally {
    isReadingLoss = false;
  }
  drawSoon();
}

/** Read the curves and the newest points anew. */
async function readAgain() {
  await readLoss();
  const { points } = await readJson(`${base}/news?after=${Math.max(0, loss.lastStep - MOST_ROWS)}`);
  rows.replace(points.slice(-MOST_ROWS));
  await readOther(false);
  if (metrics) metrics.readAgain();
}

async function begin() {
  loss = new Curve({ step: [], value: [], at: [], mean: [], count: [], width: 1, points: 0, broken: [], broken_points: 0 });
  makeLossPlot();
  makeOtherPlot();
  await untilRead(readLoss);
  draw();
  showOther(false);
  metrics = new Metrics(base, readCurve);
  const page = { seen: () => rows.lastStep, points: addPoints, marks: addMarks, standing: showStanding, reset: readAgain };
  new RunStream(root, page).follow();
}

controls.scale.addEventListener("change", () => (makeLossPlot(), draw()));
controls.weight.addEventListener("change", draw);
controls.marks.addEventListener("change", draw);
controls.series.addEventListener("change", () => ((other = closer.other = null), makeOtherPlot(), showOther(true)));
setInterval(followOwn, OWN_MS);
controls.from.addEventListener("change", lookAtFields);
controls.to.addEventListener("change", lookAtFields);
controls.whole.addEventListener("click", () => lookAtChosen(null));
begin();
