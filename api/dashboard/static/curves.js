// Curves of runs: reading columns, the moving average, and uPlot charts with marks. Text reaches the page by textContent only.
import { count, measured } from "./numbers.js";
import { whenSeen } from "./seen.js";

const COLOURS = ["--curve-1", "--curve-2", "--curve-3", "--curve-4"];

const RETRY_MS = 3000;

export const LABELS = {
  mean_loss: "Mean loss",
  learning_rate: "Learning rate",
  grad_norm: "Gradient norm",
  tokens: "Tokens",
  sampling_kl: "Sampler KL",
};
const UNITS = { mean_loss: "", learning_rate: "", grad_norm: "", tokens: "tokens a step", sampling_kl: "nats a token" };

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#4b6bfb";
}

function curveColour(number) {
  return colour(COLOURS[number % COLOURS.length]);
}

export function unitOf(series) {
  return UNITS[series] || "";
}

/** The columns of one curve. Later points are appended once, by their step. */
export class Curve {
  constructor(columns) {
    this.step = columns.step;
    this.value = columns.value;
    this.at = columns.at;
    this.mean = columns.mean;
    this.count = columns.count;
    this.width = columns.width;
    this.points = columns.points;
    this.broken = columns.broken;
    this.brokenPoints = columns.broken_points;
    this.lastStep = columns.step.length ? columns.last_step : 0;
  }

  /** Add a point; return whether it is a new one. */
  append(step, at, value, isBroken) {
    if (step <= this.lastStep) return false;
    this.step.push(step);
    this.value.push(value);
    this.at.push(at);
    this.mean.push(value);
    this.count.push(value === null ? 0 : 1);
    this.points += 1;
    this.lastStep = step;
    if (isBroken) {
      this.brokenPoints += 1;
      this.broken.push(step);
    }
    return true;
  }

  /** The moving average with this weight a step, which begins anew after a gap; null where it is not defined. */
  average(weight) {
    let sum = 0;
    let weights = 0;
    return this.value.map((value, place) => {
      if (value === null) {
        sum = weights = 0;
        return null;
      }
      const count = this.count[place];
      if (count > 0) {
        const keep = weight ** count;
        sum = keep * sum + (1 - keep) * this.mean[place];
        weights = keep * weights + (1 - keep);
      }
      return weights > 0 ? sum / weights : null;
    });
  }
}

const MARK_COLOURS = {
  checkpoint: "--mark-checkpoint",
  publication: "--mark-publication",
  reloaded: "--mark-publication",
  paused: "--mark-paused",
  resumed: "--mark-paused",
};

function markColour(kind) {
  return colour(MARK_COLOURS[kind] || "--mark-trainer");
}

/** Draw dashed lines with a dot for each mark, those of one step below each other, shaded pauses, and crosses at steps whose value is not finite. */
function marksPlugin(marks, broken) {
  return {
    hooks: {
      drawClear: [
        (plot) => {
          const { ctx, bbox } = plot;
          const end = bbox.left + bbox.width;
          let begin = null;
          const shade = (until) => {
            const left = Math.max(plot.valToPos(begin, "x", true), bbox.left);
            const right = Math.min(until, end);
            if (right > left) ctx.fillRect(left, bbox.top, right - left, bbox.height);
            begin = null;
          };
          ctx.save();
          ctx.fillStyle = colour("--mark-pause-band");
          for (const mark of marks()) {
            if (mark.kind === "paused") begin = mark.step;
            if (mark.kind === "resumed" && begin !== null) shade(plot.valToPos(mark.step, "x", true));
          }
          // A pause that goes on reaches to the end.
          if (begin !== null) shade(end);
          ctx.restore();
        },
      ],
      draw: [
        (plot) => {
          const { ctx, bbox } = plot;
          const ratio = devicePixelRatio || 1;
          const dots = new Map();
          ctx.save();
          for (const mark of marks()) {
            const x = Math.round(plot.valToPos(mark.step, "x", true));
            if (x < bbox.left || x > bbox.left + bbox.width) continue;
            ctx.strokeStyle = ctx.fillStyle = markColour(mark.kind);
            ctx.lineWidth = ratio;
            ctx.setLineDash([3 * ratio, 3 * ratio]);
            ctx.globalAlpha = 0.65;
            ctx.beginPath();
            ctx.moveTo(x, bbox.top);
            ctx.lineTo(x, bbox.top + bbox.height);
            ctx.stroke();
            ctx.setLineDash([]);
            ctx.globalAlpha = 1;
            const above = dots.get(x) || 0;
            dots.set(x, above + 1);
            ctx.beginPath();
            ctx.arc(x, Math.min(bbox.top + above * 9 * ratio, bbox.top + bbox.height), 3.5 * ratio, 0, 7);
            ctx.fill();
          }
          ctx.strokeStyle = colour("--mark-broken");
          ctx.lineWidth = 1.5 * ratio;
          for (const step of broken()) {
            const x = plot.valToPos(step, "x", true);
            const y = bbox.top + bbox.height - 7 * ratio;
            if (x < bbox.left || x > bbox.left + bbox.width) continue;
            const arm = 3.5 * ratio;
            ctx.beginPath();
            ctx.moveTo(x - arm, y - arm);
            ctx.lineTo(x + arm, y + arm);
            ctx.moveTo(x - arm, y + arm);
            ctx.lineTo(x + arm, y - arm);
            ctx.stroke();
          }
          ctx.restore();
        },
      ],
    },
  };
}

function axis(label, size) {
  return {
    label,
    labelSize: 22,
    labelFont: "12px system-ui, sans-serif",
    font: "11px ui-monospace, monospace",
    size,
    gap: 6,
    stroke: () => colour("--curve-ink"),
    grid: { stroke: () => colour("--curve-grid"), width: 1 },
    ticks: { stroke: () => colour("--curve-grid"), width: 1, size: 4 },
  };
}

const MOST_TICKS = 12;

/** The step of 1, 2 or 5 times a power of ten by which at most so many steps cover the span; 0 where there is none. */
function tickStep(span, most) {
  const power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one * most >= span);
  return Number.isFinite(step) && step > 0 ? step : 0;
}

/** A scale whose ends are ticks, so that the greatest value is read below the highest one. */
export function tickedScale(most) {
  let step = 0;
  const range = (plot, least, greatest) => {
    if (least === null) return [null, null];
    step = tickStep(greatest - least, most);
    if (!step) return uPlot.rangeNum(least, greatest, 0.1, true);
    return [Math.floor(least / step) * step, Math.ceil(greatest / step) * step];
  };
  const splits = (plot, axis, low, high) => {
    const steps = Math.round((high - low) / step);
    return steps > 0 && steps <= MOST_TICKS ? Array.from({ length: steps + 1 }, (_, place) => low + place * step) : [low, high];
  };
  return { range, splits };
}

/**
 * A chart over optimizer steps. ``lines``: label, number of the colour, width, alpha of each. ``onHover`` gets the place in the data, or null.
 * ``onPart`` gets the steps that were chosen by dragging, or null for all of them; without it the chart zooms by itself.
 */
export function chart(place, { lines, label, isLog, marks, broken, onHover, onPart, sync, height, isSmall }) {
  const ticked = tickedScale(isSmall ? 3 : 6);
  const options = {
    width: Math.max(place.clientWidth, 200),
    height: height || 300,
    legend: { show: false },
    cursor: {
      points: { size: 7 },
      drag: { x: true, y: false, uni: 10, setScale: !onPart },
      bind: onPart ? { dblclick: () => () => onPart(null) } : {},
      sync: sync ? { key: sync, setSeries: false } : undefined,
    },
    padding: [12, 12, 0, 0],
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: ticked.range } },
    axes: [
      { ...axis(isSmall ? null : "Optimizer step", isSmall ? 24 : 34), values: (_, splits) => splits.map((v) => (Number.isInteger(v) ? count(v) : "")) },
      {
        ...axis(isSmall ? null : label, isSmall ? 52 : 62),
        values: (_, splits) => splits.map((v) => (v === null ? "" : measured(v))),
        ...(isLog ? {} : { splits: ticked.splits }),
      },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        label: line.label,
        stroke: () => curveColour(line.colour),
        width: line.width,
        alpha: line.alpha ?? 1,
        spanGaps: false,
        points: { show: (plot, at) => plot.data[at].filter((v) => v !== null).length < 40 && line.width < 2, size: 5 },
      })),
    ],
    hooks: {
      setCursor: [(plot) => onHover && onHover(plot.cursor.idx ?? null)],
      setSelect: [(plot) => onPart && chosen(plot, onPart)],
    },
    plugins: [marksPlugin(marks, broken)],
  };
  const plot = new uPlot(options, [[], ...lines.map(() => [])], place);
  new ResizeObserver(() => {
    const width = place.clientWidth;
    if (width > 0 && width !== plot.width) plot.setSize({ width, height: options.height });
  }).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false, true));
  return plot;
}

function chosen(plot, onPart) {
  const { left, width } = plot.select;
  if (!(width > 0)) return;
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  onPart({ min: Math.floor(plot.posToVal(left, "x")), max: Math.ceil(plot.posToVal(left + width, "x")) });
}

/** Values that a logarithmic axis can show: others are left out, as a gap. */
export function positive(values) {
  return values.map((value) => (value !== null && value > 0 ? value : null));
}

const BADGES = { ready: "good", creating: "busy", failed: "bad" };

/** Show a run's state in its badge. */
export function showState(badge, state) {
  badge.className = `badge badge-${BADGES[state] || "none"} state`;
  badge.dataset.state = state;
  badge.textContent = state;
}

/** A series' address. What a page reads by itself, without a person having chosen something, counts as no use of the session. */
export function curveAddress(base, name, isAsked) {
  return `${base}/curve${isAsked ? "" : "/now"}?series=${encodeURIComponent(name)}`;
}

export async function readJson(url) {
  const answer = await fetch(url, { headers: { accept: "application/json" }, credentials: "same-origin" });
  if (answer.ok) return answer.json();
  const refusal = Object.assign(new Error(`${answer.status}`), { status: answer.status, text: await answer.text() });
  if (answer.status === 401) tellFailure(refusal);
  throw refusal;
}

/** Have the page tell that what it follows was not read. ``error`` is of ``readJson``. */
export function tellFailure(error) {
  dispatchEvent(error.status ? new CustomEvent("weft:refused", { detail: error }) : new Event("weft:unreached"));
}

/** Whether no later answer will be another. */
function isFinal({ status }) {
  return status >= 400 && status < 500 && status !== 408 && status !== 429;
}

/**
 * Call ``read(isAgain)`` until it succeeds or is refused for good, or ``isWanted`` no more, a few seconds after each failure, which the
 * page tells. Return what it read, or undefined.
 */
export async function untilRead(read, isWanted = () => true) {
  for (let isAgain = false; isWanted(); isAgain = true) {
    try {
      const found = await read(isAgain);
      dispatchEvent(new Event("weft:reached"));
      return found;
    } catch (error) {
      // What nobody waits for is not told: no success would follow.
      if (!isWanted()) return;
      tellFailure(error);
      if (isFinal(error)) return;
    }
    await new Promise((wake) => setTimeout(wake, RETRY_MS));
    await whenSeen();
  }
}
