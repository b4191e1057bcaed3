// What is being served and why: GET /v1/modelbay/explain as a summary and a table by stage.

import { byId, el, table } from "./dom.js";

const FACTS = [
  ["Reference", (explained) => explained.reference],
  ["Architecture", ({ resolution }) => resolution.architecture],
  ["Served by", ({ resolution: { served_by: name, architecture } }) => (name === architecture ? null : name)],
  ["Plugin", ({ resolution }) => resolution.owner],
  ["Backend", ({ resolution }) => resolution.backend],
  ["Task", ({ resolution }) => resolution.task],
  ["Source", ({ resolution }) => resolution.source],
  ["Repository", ({ resolution }) => resolution.repository],
  ["Commit", ({ resolution }) => resolution.commit],
  ["State", (explained) => (explained.loaded ? "loaded" : "loads when it is first asked for")],
];
const HEADINGS = ["Question", "Answer", "Source", "Rejected"];

export class TraceView {
  #api;
  #models;
  #trace = [];

  constructor(api, models) {
    this.#api = api;
    this.#models = models;
    byId("trace-filter").addEventListener("input", () => this.#draw());
  }

  async shown() {
    const model = this.#models.selected;
    if (!model) return;
    const explained = await this.#api.json(`v1/modelbay/explain?model=${encodeURIComponent(model.id)}`);
    if (this.#models.selected?.id !== model.id) return; // another was chosen meanwhile
    const facts = FACTS.map(([name, read]) => [name, read(explained)]).filter(([, value]) => value);
    byId("summary").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    this.#trace = explained.trace;
    this.#draw();
  }

  #draw() {
    const wanted = byId("trace-filter").value.trim().toLowerCase();
    const found = this.#trace.filter((decision) => !wanted || JSON.stringify(decision).toLowerCase().includes(wanted));
    const stages = new Map();
    for (const decision of found) {
      if (!stages.has(decision.stage)) stages.set(decision.stage, []);
      stages.get(decision.stage).push(decisionRow(decision));
    }
    const groups = [...stages].map(([title, rows]) => ({ title, rows }));
    byId("trace-count").textContent = `${found.length} of ${this.#trace.length} decisions`;
    byId("trace").replaceChildren(...(found.length ? [table("Decisions by stage", HEADINGS, groups)] : []));
  }
}

function decisionRow({ question, answer, source, rejected, level }) {
  const warning = level === "warning";
  const question_ = warning ? [el("span", { class: "badge" }, "warning"), " ", question] : question;
  return { cells: [question_, words(answer), source, rejections(rejected)], mark: warning ? "warning" : null };
}

function rejections(rejected) {
  if (!rejected.length) return "";
  const items = rejected.map(({ option, reason }) => el("li", {}, el("b", {}, option), reason ? `: ${reason}` : ""));
  return el("ul", { class: "rejected" }, ...items);
}

/** An answer as people read it; what is nested deeper stays JSON. */
function words(answer) {
  const plain = (value) => value === null || typeof value !== "object";
  if (answer === null) return "none";
  if (plain(answer)) return String(answer);
  if (Array.isArray(answer) && answer.every(plain)) return answer.join(", ") || "none";
  if (!Array.isArray(answer) && Object.values(answer).every(plain)) {
    return Object.entries(answer).map(([key, value]) => `${key}=${value}`).join(", ") || "none";
  }
  return JSON.stringify(answer);
}
