// Numbers as the service's own pages write them (``rendering.py``): a number that comes while a page is open looks as after a reload.

const NARROW_SPACE = "\u202f";
const TIE_DIGITS = 30;
const UNITS = [
  [86400, "d", 3600, "h"],
  [3600, "h", 60, "min"],
  [60, "min", 1, "s"],
];

/** The number with ``places`` decimal places; a number half-way between two becomes the even one. */
function fixed(value, places) {
  const text = value.toFixed(places);
  const isTie = /^50*$/.test(value.toFixed(places + TIE_DIGITS).slice(-TIE_DIGITS));
  return isTie && Number(text[text.length - 1]) % 2 ? (value - 0.5 / 10 ** places).toFixed(places) : text;
}

function isNone(value) {
  return value === null || value === undefined || !Number.isFinite(value);
}

/** A whole number with its thousands apart; a dash for none. */
export function count(value) {
  if (isNone(value)) return "–";
  const digits = fixed(Math.abs(value), 0).replace(/\B(?=(\d{3})+$)/g, NARROW_SPACE);
  return value < 0 ? `-${digits}` : digits;
}

/** A measured number with four digits that count, from a thousand on a whole one; a power of ten is told of the least and greatest. */
export function measured(value) {
  if (isNone(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e3 && size < 1e7) return count(value);
  const sign = value < 0 ? "-" : "";
  const power = Number(size.toExponential(3).split("e")[1]);
  if (power >= -4 && size < 1e3) return sign + Number(fixed(size, 3 - power));
  const [digits, exponent] = String(Number(size.toPrecision(4)).toExponential()).split(/e[+-]/);
  return `${sign}${digits}e${power < 0 ? "-" : "+"}${exponent.padStart(2, "0")}`;
}

/** A length of time in its two largest units, a number being seconds. */
export function duration(seconds) {
  if (isNone(seconds)) return "–";
  if (seconds < 1) return `${fixed(seconds * 1000, 0)}${NARROW_SPACE}ms`;
  if (seconds < 60) return `${fixed(seconds, seconds < 10 ? 1 : 0)}${NARROW_SPACE}s`;
  const whole = Math.trunc(seconds);
  const [size, name, small, ofSmall] = UNITS.find(([least]) => whole >= least);
  const rest = Math.floor((whole % size) / small);
  return `${Math.floor(whole / size)}${NARROW_SPACE}${name}${rest ? ` ${rest}${NARROW_SPACE}${ofSmall}` : ""}`;
}

/** ``one`` for one thing, ``several`` for any other number of them. */
export function noun(number, one, several = `${one}s`) {
  return number === 1 ? one : several;
}
