// A run's newest points: the table of them, and the figures above the curve, as the service writes both.
import { count, measured, noun } from "./numbers.js";
import { exact } from "./times.js";

export const MOST_ROWS = 50;

/** Seconds since 1970 of a time in ISO 8601, with its microseconds: a speed is made of them. */
function secondsOf(text) {
  const [, micro] = text.match(/\.\d{3}(\d{1,3})/) || [null, ""];
  return Date.parse(text) / 1000 + Number(`0.000${micro}`);
}

/** What the loss of a point is divided by; empty where its passes differ in that, or there were none. */
export function perOf(point) {
  return ["mixed", "nothing"].includes(point.loss_per) ? "" : point.loss_per.replaceAll("_", " ");
}

/** The loss functions of a point's passes, in their order. */
function lossesOf(point) {
  // A service of an earlier version tells none.
  return (point.loss_fns ?? []).join(", ") || "–";
}

function say(selector, text) {
  document.querySelector(selector).textContent = text;
}

function figure(name, text) {
  say(`[data-figure="${name}"]`, text);
}

export class PointRows {
  /** Begin with the rows that the page was loaded with. */
  constructor() {
    this.body = document.querySelector("#points tbody");
    this.points = [...this.body.rows].reverse().map(({ dataset }) => ({
      step: Number(dataset.step),
      seconds: Number(dataset.seconds),
      tokens: Number(dataset.tokens),
    }));
  }

  get lastStep() {
    return this.points.length ? this.points[this.points.length - 1].step : 0;
  }

  /** Add the points that are not there yet, in order of their steps. */
  add(points) {
    const later = points.filter((point) => point.step > this.lastStep);
    if (!later.length) return;
    for (const point of later) this.addRow(point);
    while (this.body.rows.length > MOST_ROWS) this.body.deleteRow(-1);
    const { length } = this.body.rows;
    say("#points [data-rows]", `${count(length)} ${noun(length, "point")}`);
    const per = perOf(later[later.length - 1]);
    say("#points [data-loss-per]", per && `; the loss is divided by each ${per}`);
    this.points.push(...later.map(({ step, at, tokens }) => ({ step, seconds: secondsOf(at), tokens })));
    this.points.splice(0, this.points.length - MOST_ROWS);
    this.showFigures(later[later.length - 1]);
  }

  /** Show these points alone: there are others between them and those that were shown. */
  replace(points) {
    this.points = [];
    this.body.replaceChildren();
    this.add(points);
  }

  addRow(point) {
    const row = document.createElement("tr");
    const cells = [count(point.step), measured(point.mean_loss), measured(point.learning_rate), measured(point.grad_norm)];
    cells.push(count(point.tokens), measured(point.sampling_kl));
    for (const text of cells) {
      const cell = document.createElement("td");
      cell.className = "number";
      cell.textContent = text;
      row.append(cell);
    }
    for (const text of [lossesOf(point), exact(Date.parse(point.at) / 1000)]) row.insertCell().textContent = text;
    this.body.prepend(row);
  }

  /** Tell steps, loss, speed and learning rate. */
  showFigures(last) {
    for (const part of document.querySelectorAll("[data-when-stepped]")) part.hidden = false;
    figure("steps", count(last.step));
    say("[data-of=steps]", noun(last.step, "optimizer step"));
    figure("loss", measured(last.mean_loss));
    figure("rate", measured(last.learning_rate));
    figure("loss-functions", lossesOf(last));
    const seconds = this.points[this.points.length - 1].seconds - this.points[0].seconds;
    const tokens = this.points.slice(1).reduce((sum, point) => sum + point.tokens, 0);
    figure("speed", seconds > 0 ? count(tokens / seconds) : "–");
  }
}
