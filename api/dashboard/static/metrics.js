// Small curves of all of a run's metrics: read when they come into sight, and followed from then on.
import { Curve, LABELS, chart, readJson, short } from "./curves.js";

const OWN_MS = 15000;
const MOST_LIVE_ENTRIES = 4000;

export class Metrics {
  /** ``read(name)`` gives the curve of a series with all points that came meanwhile. */
  constructor(base, read) {
    this.base = base;
    this.read = read;
    this.shown = new Map();
    const sight = new IntersectionObserver((entries) => entries.forEach((one) => this.see(one)), { rootMargin: "200px" });
    for (const figure of document.querySelectorAll("#metrics [data-series]")) sight.observe(figure);
    setInterval(() => this.followOwn(), OWN_MS);
  }

  see({ target, isIntersecting }) {
    target.dataset.inSight = isIntersecting;
    if (isIntersecting && !this.shown.has(target)) this.draw(target).catch(() => this.shown.delete(target));
  }

  async draw(figure) {
    const name = figure.dataset.series;
    this.shown.set(figure, null);
    const curve = await this.curveOf(name);
    const lines = [{ label: name, colour: name in LABELS ? 1 : 0, width: 1.5 }];
    const marks = () => [];
    const broken = () => (this.shown.get(figure) || { curve }).curve.broken;
    const plot = chart(figure.querySelector(".plot"), { lines, marks, broken, isSmall: true, height: 140, sync: "run" });
    this.shown.set(figure, { curve, plot });
    this.paint(figure);
  }

  /** Read a curve. A user's own metric has a count of steps of its own, and no point of it comes by the stream. */
  async curveOf(name) {
    if (name in LABELS) return this.read(name);
    return new Curve(await readJson(`${this.base}/curve?series=${encodeURIComponent(name)}`));
  }

  paint(figure) {
    const { curve, plot } = this.shown.get(figure);
    plot.setData([curve.step, curve.value]);
    figure.dataset.points = curve.points;
    figure.classList.toggle("has-none", curve.points > 0 && curve.value.every((value) => value === null));
    const last = curve.value.length - 1;
    if (last < 0) return;
    figure.querySelector("[data-last]").textContent = short(curve.value[last]);
    const step = figure.querySelector("[data-step]");
    if (step) step.textContent = short(curve.step[last]);
  }

  /** Add a point of the stream to the curves that are drawn. */
  add(point) {
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
      drawn.curve = await this.curveOf(figure.dataset.series);
      this.paint(figure);
    } catch {
      // The next look tells again what is missing.
    } finally {
      drawn.isReading = false;
    }
  }

  followOwn() {
    if (document.hidden) return;
    for (const [figure, drawn] of this.shown) {
      const name = figure.dataset.series;
      if (!drawn || name in LABELS || figure.dataset.inSight !== "true") continue;
      this.refresh(figure, drawn);
    }
  }
}
