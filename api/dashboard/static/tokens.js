// Tokens of samples: draws them, marks hidden characters, and tells of the token that is pointed at or focused.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/u;
const KINDS = 6;

/** Writes text into an element; characters that a reader would not see are named in marks. */
export function writeMarked(element, text) {
  let plain = "";
  const flush = () => {
    if (plain) element.append(plain);
    plain = "";
  };
  for (const character of text) {
    if (character === "\n" || character === "\t" || !HIDDEN.test(character)) {
      plain += character;
      continue;
    }
    flush();
    const mark = document.createElement("span");
    mark.className = "hidden-char";
    mark.textContent = "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    element.append(mark);
  }
  flush();
}

/** Letter of the place of a version among all that were seen. */
export function letter(place) {
  return String.fromCharCode(65 + (place % 26));
}

/** Class with the colour and the underline of the version at this place. */
export function look(place) {
  return "v" + (place % KINDS);
}

/** Returns the element of a token: {index, id, text, logprob, top} of the version at ``place``. */
export function tokenElement(token, place, isFirst, prefix) {
  const element = document.createElement("span");
  element.className = "tok " + look(place) + (isFirst ? " first" : "");
  element.setAttribute("role", "option");
  element.id = prefix + token.index;
  element.dataset.index = token.index;
  element.dataset.token = token.id;
  element.dataset.letter = letter(place);
  element.dataset.logprob = token.logprob;
  element.dataset.top = JSON.stringify(token.top || []);
  const logprob = Number(token.logprob).toFixed(3);
  element.setAttribute("aria-label", `${token.text} — token ${token.index}, version ${letter(place)}, logprob ${logprob}`);
  element.setAttribute("aria-selected", "false");
  writeMarked(element, token.text);
  return element;
}

function row(list, term, text) {
  const name = document.createElement("dt");
  const value = document.createElement("dd");
  name.textContent = term;
  writeMarked(value, text);
  const pair = document.createElement("div");
  pair.append(name, value);
  list.append(pair);
}

function percent(logprob) {
  return (100 * Math.exp(logprob)).toFixed(1) + " %";
}

/** Fills the pane's inspector with the facts of a token. */
function tell(token) {
  const box = token.closest(".pane")?.querySelector(".inspector");
  if (!box) return;
  const list = document.createElement("dl");
  const logprob = Number(token.dataset.logprob);
  row(list, "Token", token.dataset.index);
  row(list, "Id", token.dataset.token);
  row(list, "Version", token.dataset.letter);
  row(list, "Logprob", `${logprob.toFixed(4)} (${percent(logprob)})`);
  const top = JSON.parse(token.dataset.top || "[]");
  const shown = [list];
  if (top.length) {
    const table = document.createElement("table");
    const caption = table.createCaption();
    caption.textContent = "Likeliest here";
    for (const [text, value] of top) {
      const line = table.insertRow();
      writeMarked(line.insertCell(), JSON.stringify(text));
      const number = line.insertCell();
      number.className = "number";
      number.textContent = `${value.toFixed(3)} (${percent(value)})`;
    }
    shown.push(table);
  }
  box.replaceChildren(...shown);
  box.dataset.token = token.dataset.index;
}

function choose(list, token) {
  if (!token) return;
  list.querySelector(".tok.active")?.setAttribute("aria-selected", "false");
  list.querySelector(".tok.active")?.classList.remove("active");
  token.classList.add("active");
  token.setAttribute("aria-selected", "true");
  list.setAttribute("aria-activedescendant", token.id);
  token.scrollIntoView({ block: "nearest" });
  tell(token);
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

document.addEventListener("pointerover", (event) => {
  const token = event.target instanceof Element ? event.target.closest(".tok") : null;
  if (token) tell(token);
});
document.addEventListener("click", (event) => {
  const token = event.target instanceof Element ? event.target.closest(".tok") : null;
  if (token) choose(token.closest(".tokens"), token);
});
document.addEventListener("focusin", (event) => {
  const list = event.target;
  if (!(list instanceof Element) || !list.classList.contains("tokens")) return;
  choose(list, list.querySelector(".tok.active") || list.querySelector(".tok"));
});
document.addEventListener("keydown", (event) => {
  const list = event.target;
  if (!(list instanceof Element) || !list.classList.contains("tokens")) return;
  const tokens = [...list.querySelectorAll(".tok")];
  const now = tokens.findIndex((token) => token.classList.contains("active"));
  let next = null;
  if (event.key in STEPS) next = tokens[Math.min(Math.max(now + STEPS[event.key], 0), tokens.length - 1)];
  if (event.key === "Home") next = tokens[0];
  if (event.key === "End") next = tokens[tokens.length - 1];
  if (!next) return;
  event.preventDefault();
  choose(list, next);
});
