// The playground: streams one or two samples into panes, colours tokens by weight version, stops and pauses them.

import { whenSeen } from "./seen.js";
import { letter, look, tokenElement, writeMarked } from "./tokens.js";

const TRIES = 6;
const LONGEST_RETRY = 10000;
const GATE_KINDS = { open: "good", pausing: "busy", paused: "warn" };
const form = document.querySelector("form[data-playground]");
const panes = [...document.querySelectorAll(".pane[data-pane]")];
/** Versions in the order in which any pane has met them, and what is known of each. */
const versions = new Map();

function placeOf(version) {
  const name = version ?? "";
  if (!versions.has(name)) versions.set(name, { place: versions.size, path: null, step: null });
  return versions.get(name).place;
}

function nameOf(version) {
  const known = versions.get(version ?? "");
  if (version === null) return "bare base model";
  if (!known || known.step === null) return version.slice(0, 8);
  const name = known.path ? known.path.split("/").pop() : version.slice(0, 8);
  return `${name} · step ${known.step}`;
}

class Pane {
  constructor(element) {
    this.element = element;
    this.list = element.querySelector(".tokens");
    this.status = element.querySelector(".pane-state");
    this.stopper = element.querySelector("[data-stop]");
    this.gate = element.querySelector("[data-gate]");
    this.stopper.addEventListener("click", () => this.stop());
    for (const button of this.gate.querySelectorAll("button")) {
      button.addEventListener("click", () => this.turnGate(button.dataset.act));
    }
  }

  begin(body, option) {
    Object.assign(this, { body, key: newKey(), tokens: [], request: null, run: null });
    Object.assign(this, { isOver: false, isStopped: false, isDisplaced: false, isHeld: false });
    this.element.hidden = false;
    const heading = this.element.querySelector(".pane-model");
    heading.textContent = option.textContent;
    heading.title = option.title;
    this.element.querySelector(".inspector").replaceChildren();
    this.element.querySelector(".report").replaceChildren();
    this.list.replaceChildren();
    this.gate.hidden = true;
    this.stopper.hidden = this.stopper.disabled = false;
    this.draw();
    this.tell();
    this.follow();
  }

  tell() {
    const made = `${this.tokens.length} ${this.tokens.length === 1 ? "token" : "tokens"}`;
    if (this.isOver) return;
    if (this.isStopped) this.say("stopping", "Stopping …");
    else if (this.isHeld) this.say("paused", `Paused after ${made}: goes on when the gate opens`);
    else if (this.tokens.length) this.say("streaming", made);
    else this.say("waiting", "Waiting for the first token …");
  }

  say(state, text) {
    this.element.dataset.state = state;
    this.status.textContent = text;
  }

  async follow() {
    let told = null;
    for (let attempt = 0; attempt < TRIES && !this.isOver; attempt += 1) {
      if (attempt) await new Promise((wake) => setTimeout(wake, 250 * 2 ** attempt));
      this.isReached = false;
      try {
        const answer = await fetch(form.dataset.stream, {
          method: "POST",
          body: this.body,
          headers: { "Idempotency-Key": this.key, Accept: "text/event-stream" },
        });
        if (!answer.ok) {
          told = await refusal(answer);
          if (answer.status < 500) {
            this.end("refused", told);
            return;
          }
          this.say("lost", `${told}; trying again …`);
          continue;
        }
        await this.read(answer.body.getReader());
        if (this.isDisplaced && !this.isOver) {
          this.end("error", "Other pages of this session took its streams. Close some of them, and sample again.");
        }
      } catch {
        this.say("lost", "The connection was lost; going on …");
      }
      // The service keeps a sample for a short while only. It is there: no reason to ask it ever more rarely.
      if (this.isReached) attempt = 0;
    }
    if (this.isOver) return;
    if (this.request || !told) this.end("error", "The stream could not be taken up again. The sample is under Samples.");
    else this.end("refused", told);
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) this.take(event);
    }
  }

  take(event) {
    let name = "";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      if (line.startsWith("data: ")) data += line.slice(6);
      // The service ends the oldest of too many streams, and says by this not to come back soon.
      if (line.startsWith("retry: ") && Number(line.slice(7)) > LONGEST_RETRY) this.isDisplaced = true;
    }
    if (name) this["on_" + name]?.(JSON.parse(data));
  }

  on_accepted(told) {
    const isFirst = !this.request;
    this.request = told.request_id;
    this.isReached = true;
    this.run = told.run;
    this.element.dataset.request = told.request_id;
    if (this.isStopped) this.cancel();
    if (isFirst && this.run && form.dataset.gates) this.watchGate();
  }

  on_version(told) {
    placeOf(told.version);
    Object.assign(versions.get(told.version), { path: told.path, step: told.step });
    this.drawLegend();
  }

  on_tokens(told) {
    this.place(told.tokens);
    this.tell();
  }

  on_done(told) {
    for (const one of told.versions) this.on_version(one);
    this.tokens = [];
    this.list.replaceChildren();
    this.place(told.tokens);
    this.element.dataset.text = told.tokens.map((token) => token.text).join("");
    const report = this.element.querySelector(".report");
    const link = document.createElement("a");
    link.href = `/ui/samples/${encodeURIComponent(told.request_id)}`;
    link.textContent = "Report";
    report.replaceChildren(
      `${told.attempts} ${told.attempts === 1 ? "attempt" : "attempts"} · queued ${told.queue_seconds.toFixed(2)} s · ` +
        `decoded ${told.decode_seconds.toFixed(2)} s · `,
      link,
    );
    this.end("done", `${this.tokens.length} tokens, ended by ${told.stop_reason}`);
  }

  on_error(told) {
    if (this.isStopped) this.end("stopped", `Stopped after ${this.tokens.length} tokens`);
    else if (told.code === "unavailable") {
      // The sample goes on without this process, or without this answer.
      this.isReached = false;
      this.say("lost", `${told.error}; trying again …`);
    } else this.end("error", told.error);
  }

  place(made) {
    for (const token of made) {
      for (const last of [...this.list.children].slice(token.index)) last.remove();
      this.tokens.length = token.index;
      const before = this.tokens.at(-1);
      const isFirst = !before || before.version !== token.version;
      this.tokens.push(token);
      const place = placeOf(token.version);
      this.list.append(tokenElement(token, place, isFirst, `${this.element.id}-t`));
    }
    this.draw();
  }

  draw() {
    this.element.dataset.tokens = this.tokens.length;
    const spans = [];
    for (const token of this.tokens) {
      const last = spans.at(-1);
      if (last && last.version === token.version) last.end = token.index + 1;
      else spans.push({ version: token.version, start: token.index, end: token.index + 1 });
    }
    this.element.dataset.spans = JSON.stringify(spans);
    this.drawLegend();
  }

  drawLegend() {
    const counts = new Map();
    for (const token of this.tokens) counts.set(token.version, (counts.get(token.version) ?? 0) + 1);
    const items = [...counts].map(([version, count]) => {
      const place = placeOf(version);
      const item = document.createElement("li");
      const chip = document.createElement("span");
      chip.className = `chip ${look(place)}`;
      chip.textContent = letter(place);
      item.title = version ?? "";
      item.append(chip);
      writeMarked(item, ` ${nameOf(version)} · ${count} ${count === 1 ? "token" : "tokens"}`);
      return item;
    });
    this.element.querySelector(".legend").replaceChildren(...items);
  }

  end(state, text) {
    this.isOver = true;
    this.stopper.hidden = true;
    this.gate.hidden = true;
    this.say(state, text);
  }

  stop() {
    this.isStopped = this.stopper.disabled = true;
    this.tell();
    // Until it is accepted a sample has no name to stop it by.
    if (this.request) this.cancel();
  }

  async cancel() {
    const url = `/ui/samples/${encodeURIComponent(this.request)}/stop`;
    try {
      const answer = await fetch(url, { method: "POST", redirect: "manual" });
      if (answer.ok || answer.type === "opaqueredirect") return;
    } catch {
      // It goes on, and can be stopped again.
    }
    this.isStopped = this.stopper.disabled = false;
    this.tell();
  }

  async watchGate() {
    this.gate.hidden = false;
    while (!this.isOver) {
      try {
        const answer = await fetch(this.gateUrl("state"));
        if (answer.ok) this.showGate(await answer.json());
      } catch {
        // The stream itself tells of a lost connection.
      }
      await new Promise((wake) => setTimeout(wake, 1000));
      await whenSeen();
    }
  }

  gateUrl(act) {
    return `/ui/adapters/${encodeURIComponent(this.run)}/${act}`;
  }

  showGate(state) {
    this.generation = state.generation;
    this.gate.dataset.state = state.state;
    const badge = this.gate.querySelector(".gate-state");
    badge.className = `gate-state badge badge-${GATE_KINDS[state.state] ?? "none"}`;
    badge.textContent = state.reason ? `${state.state}: ${state.reason}` : state.state;
    this.isHeld = state.state === "paused";
    this.tell();
    this.gate.querySelector("[data-act=pause]").hidden = state.state !== "open";
    this.gate.querySelector("[data-act=resume]").hidden = state.state === "open";
  }

  async turnGate(act) {
    const body = new URLSearchParams({ generation: this.generation });
    if (act === "pause") body.set("mode", "keep");
    const headers = { Accept: "application/json" };
    const answer = await fetch(this.gateUrl(act), { method: "POST", body, headers });
    if (answer.ok) this.showGate(await answer.json());
    else this.gate.querySelector(".gate-state").textContent = await refusal(answer);
  }
}

function newKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function refusal(answer) {
  // What was written stays: nobody is led away from it.
  if (answer.status === 401) return "The session has ended. Log in again in another tab, then sample again.";
  try {
    const told = await answer.json();
    return told.detail ?? `The service answered ${answer.status}`;
  } catch {
    return `The service answered ${answer.status}`;
  }
}

if (form) {
  const shown = panes.map((element) => new Pane(element));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (shown.some((pane) => pane.key && !pane.isOver)) return;
    versions.clear();
    const fields = new FormData(form);
    const chosen = ["model", "beside"].map((name) => form.elements[name].selectedOptions[0]).filter((option) => option?.value);
    document.querySelector(".panes").dataset.count = chosen.length;
    shown.forEach((pane, number) => {
      pane.element.hidden = number >= chosen.length;
      if (number >= chosen.length) return;
      const body = new URLSearchParams(fields);
      body.set("model", chosen[number].value);
      body.delete("beside");
      pane.begin(body, chosen[number]);
    });
  });
  document.body.dataset.playground = "ready";
}
