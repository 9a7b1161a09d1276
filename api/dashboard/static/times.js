// Times as their distance from now, with the exact one on hover. They grow older while a page is open.

const NARROW_SPACE = "\u202f";
const EVERY_MS = 5000;
const SIZES = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
];
// Distances are by the service's clock: the browser's own may be wrong.
const { now } = document.documentElement.dataset;
const ahead = now ? Date.parse(now) - Date.now() : 0;

/** A time to the second, in UTC. ``at``: seconds since 1970. */
export function exact(at) {
  return at ? new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "";
}

/** A time's distance from now, in the words that the service's own pages have. ``at``: seconds since 1970. */
function ago(at) {
  const seconds = (Date.now() + ahead) / 1000 - at;
  const away = Math.abs(seconds);
  if (away < 5) return "now";
  const [size, unit] = SIZES.find(([least]) => away >= least) || [1, "s"];
  const told = `${size === 1 ? Math.round(away) : Math.floor(away / size)}${NARROW_SPACE}${unit}`;
  return seconds > 0 ? `${told} ago` : `in ${told}`;
}

/** An element that tells a time as the service's pages do. ``text``: the time in ISO 8601. */
export function timeElement(text) {
  const time = document.createElement("time");
  const at = Date.parse(text) / 1000;
  time.dateTime = text;
  time.title = exact(at);
  time.textContent = ago(at);
  return time;
}

function age() {
  if (document.hidden) return;
  for (const time of document.querySelectorAll("time[datetime]")) {
    const text = ago(Date.parse(time.dateTime) / 1000);
    if (time.textContent !== text) time.textContent = text;
  }
}

setInterval(age, EVERY_MS);
document.addEventListener("visibilitychange", age);
