// Small curves of all of a run's metrics: read when they come into sight, and followed from then on.
import { Curve, LABELS, chart, curveAddress, readJson } from "./curves.js";
import { count, measured, noun } from "./numbers.js";
import { onSeen } from "./seen.js";
import { timeElement } from "./times.js";
import { writeMarked } from "./tokens.js";

export const OWN_MS = 15000;
const MOST_LIVE_ENTRIES = 4000;

function valueRow(curve, place) {
  const row = document.createElement("tr");
  for (const text of [count(curve.step[place]), curve.value[place] === null ? "not finite" : measured(curve.value[place])]) {
    const cell = row.insertCell();
    cell.className = "number";
    cell.textContent = text;
  }
  row.insertCell().append(timeElement(new Date(curve.at[place] * 1000).toISOString()));
  return row;
}

export class Metrics {
  /** ``read(name, isAsked)`` gives the curve of a series with all points that came meanwhile. */
  constructor(base, read) {
    this.base = base;
    this.read = read;
    this.shown = new Map();
    this.sight = new IntersectionObserver((entries) => entries.forEach((one) => this.see(one)), { rootMargin: "200px" });
    for (const figure of document.querySelectorAll("#metrics [data-series]")) this.sight.observe(figure);
    setInterval(() => this.followOwn(), OWN_MS);
    onSeen(() => this.followOwn());
  }

  /** Give each of the user's own metrics that the page has not shown yet its figure. */
  showOwn(names) {
    const section = document.getElementById("metrics");
    const plots = section.querySelector(".small-plots");
    const known = new Set([...plots.children].map((figure) => figure.dataset.series));
    for (const name of names.filter((one) => !known.has(`metric:${one}`))) {
      const figure = section.querySelector("template[data-own]").content.firstElementChild.cloneNode(true);
      figure.dataset.series = `metric:${name}`;
      const title = figure.querySelector(".small-name");
      title.title = name;
      writeMarked(title, name);
      figure.querySelector(".plot").setAttribute("aria-label", `Curve of ${name}; its values are in the table below it`);
      figure.querySelector(".table-wrap").setAttribute("aria-label", `Values of ${name}`);
      figure.querySelector("caption").textContent = `The last values of ${name}, newest first`;
      plots.append(figure);
      section.hidden = section.querySelector("[data-own-file]").hidden = false;
      this.sight.observe(figure);
    }
  }

  see({ target, isIntersecting }) {
    target.dataset.inSight = isIntersecting;
    if (isIntersecting) this.drawOnce(target, true);
  }

  drawOnce(figure, isAsked) {
    if (!this.shown.has(figure)) this.draw(figure, isAsked).catch(() => this.shown.delete(figure));
  }

  async draw(figure, isAsked) {
    const name = figure.dataset.series;
    this.shown.set(figure, null);
    const curve = await this.curveOf(name, isAsked);
    const lines = [{ label: name, colour: name in LABELS ? 1 : 0, width: 1.5 }];
    const marks = () => [];
    const broken = () => (this.shown.get(figure) || { curve }).curve.broken;
    const plot = chart(figure.querySelector(".plot"), { lines, marks, broken, isSmall: true, height: 140, sync: "run" });
    this.shown.set(figure, { curve, plot });
    this.paint(figure);
  }

  /** Read a curve. A user's own metric has a count of steps of its own, and no point of it comes by the stream. */
  async curveOf(name, isAsked) {
    if (name in LABELS) return this.read(name, isAsked);
    const curve = await this.readOwn(name, 0, isAsked);
    const figure = [...this.shown.keys()].find((one) => one.dataset.series === name);
    await this.fillTable(figure.querySelector("details"), name, curve);
    return curve;
  }

  async readOwn(name, begin, isAsked) {
    return new Curve(await readJson(`${curveAddress(this.base, name, isAsked)}&begin=${begin}`));
  }

  /** Fill the table of an own metric's last values. */
  async fillTable(details, name, curve) {
    const body = details.querySelector("tbody");
    const most = Number(body.dataset.most);
    const end = await this.endOf(name, curve, most);
    const rows = end.step.slice(-most).map((_, place, { length }) => valueRow(end, end.step.length - length + place));
    body.replaceChildren(...rows.reverse());
    details.querySelector("[data-rows]").textContent = `${rows.length} ${noun(rows.length, "value")}`;
  }

  /** The end of a curve with every one of its values: a long curve has the least and greatest of many alone. */
  async endOf(name, curve, most) {
    let end = curve;
    for (let entries = most; end.width > 1 && entries > 0; entries = Math.floor(entries / 2)) {
      end = await this.readOwn(name, curve.step[Math.max(0, curve.step.length - entries)], false);
    }
    return end;
  }

  paint(figure) {
    const { curve, plot } = this.shown.get(figure);
    plot.setData([curve.step, curve.value]);
    figure.dataset.points = curve.points;
    const isServices = figure.dataset.series in LABELS;
    figure.classList.toggle("has-none", isServices && curve.points > 0 && curve.value.every((value) => value === null));
    const last = curve.value.length - 1;
    if (last >= 0) this.tell(figure, curve.step[last], curve.value[last]);
  }

  tell(figure, at, value) {
    figure.querySelector("[data-last]").textContent = measured(value);
    const step = figure.querySelector("[data-step]");
    if (step) step.textContent = count(at);
  }

  /** Add a point of the stream to the curves that are drawn. */
  add(point) {
    for (const figure of document.querySelectorAll("#metrics [data-series]")) {
      const name = figure.dataset.series;
      // One that has not come into sight is drawn later, and told at once.
      if (name in LABELS && !this.shown.get(figure)) this.tell(figure, point.step, point[name] ?? null);
    }
    for (const [figure, drawn] of this.shown) {
      const name = figure.dataset.series;
      if (!drawn || !(name in LABELS)) continue;
      if (drawn.curve.append(point.step, Date.parse(point.at) / 1000, point[name] ?? null, false)) this.paint(figure);
      if (drawn.curve.step.length > MOST_LIVE_ENTRIES) this.refresh(figure, drawn);
    }
  }

  /** Read every curve that is drawn anew: the stream does not send what is missing. */
  readAgain() {
    for (const [figure, drawn] of this.shown) if (drawn) this.refresh(figure, drawn);
  }

  async refresh(figure, drawn) {
    if (drawn.isReading) return;
    drawn.isReading = true;
    try {
      drawn.curve = await this.curveOf(figure.dataset.series, false);
      this.paint(figure);
    } catch {
      // The next look tells again what is missing.
    } finally {
      drawn.isReading = false;
    }
  }

  followOwn() {
    if (document.hidden) return;
    for (const figure of document.querySelectorAll('#metrics [data-in-sight="true"]')) this.drawOnce(figure, false);
    for (const [figure, drawn] of this.shown) {
      const name = figure.dataset.series;
      if (!drawn || name in LABELS || figure.dataset.inSight !== "true") continue;
      this.refresh(figure, drawn);
    }
  }
}
