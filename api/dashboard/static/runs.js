// The list of runs: states, steps, losses and last requests of the rows go on while the page is open.
import { readJson, showState, tellFailure } from "./curves.js";
import { count, measured } from "./numbers.js";
import { whenSeen } from "./seen.js";
import { timeElement } from "./times.js";

const EVERY_MS = 5000;
const form = document.getElementById("runs");

function show(told) {
  const row = form.querySelector(`tr[data-run="${CSS.escape(told.id)}"]`);
  if (!row) return false;
  showState(row.querySelector(".state"), told.state);
  row.querySelector('[data-field="steps"]').textContent = count(told.steps);
  row.querySelector('[data-field="loss"]').textContent = measured(told.loss);
  row.querySelector(".spark path").setAttribute("d", told.path);
  row.querySelector(".spark title").textContent = told.label;
  row.querySelector('[data-field="at"]').replaceChildren(timeElement(told.at));
  return true;
}

async function look() {
  await whenSeen();
  try {
    const shown = [...form.querySelectorAll("tr[data-run]")].map((row) => ["run", row.dataset.run]);
    const { runs } = await readJson(`${form.dataset.live}?${new URLSearchParams(shown)}`);
    runs.forEach(show);
    form.dataset.looks = Number(form.dataset.looks || 0) + 1;
    dispatchEvent(new Event("weft:reached"));
  } catch (error) {
    // The next look may succeed.
    tellFailure(error);
  }
  setTimeout(look, EVERY_MS);
}

if (form && form.querySelector("tr[data-run]")) setTimeout(look, EVERY_MS);
