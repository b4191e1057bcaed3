// Live measurements: /metrics, read again and again, as plots of the chosen model.

import { byId } from "./dom.js";
import { Plot } from "./plots.js";
import { parse } from "./prometheus.js";

const EVERY = 1000; // milliseconds
const SPAN = 120; // seconds that the plots show

const count = (value) => String(Math.round(value));
const percent = (value) => `${(value * 100).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} %`;
const rate = (value) => `${value.toFixed(value < 10 ? 1 : 0)} tokens/s`;
const time = (value) => (value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`);

/** Title, how a value is written, the end of the axis where it is fixed, and the value of a sample, given the one before it. */
const PLOTS = [
  ["Running sequences", count, null, (now) => now.running],
  ["Queued sequences", count, null, (now) => now.waiting],
  ["KV cache in use", percent, null, (now) => now.kv],
  ["Tokens generated", rate, null, (now, before) => before && Math.max(0, now.tokens - before.tokens) / (now.at - before.at)],
  ["Time to first token", time, null, (now, before) => before && mean(now, before, "firstSum", "firstCount")],
  ["Prompt tokens from the prefix cache", percent, 1, (now, before) => before && mean(now, before, "cached", "lookedUp")],
];

export class MetricsView {
  #api;
  #models;
  #samples = []; // of the server: { at, read }
  #plots = PLOTS.map(([title, format, most]) => new Plot(title, format, most));
  #timer = null;
  #polls = 0;
  #waitsForKey = false;

  constructor(api, models) {
    this.#api = api;
    this.#models = models;
    byId("plots").append(...this.#plots.map((plot) => plot.element));
    models.addEventListener("change", () => {
      this.#waitsForKey = false;
      this.#draw();
      this.#poll();
    });
    document.addEventListener("visibilitychange", () => this.#poll());
    this.#poll();
  }

  shown() {
    this.#draw();
  }

  async #poll() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#waitsForKey) return;
    const poll = ++this.#polls;
    let wait = EVERY;
    try {
      this.#take(parse(await this.#api.text("metrics")));
      byId("metrics-state").textContent = `Of the last ${SPAN / 60} minutes, measured while this page is open.`;
    } catch (error) {
      this.#waitsForKey = error.status === 401;
      wait = 5 * EVERY;
      byId("metrics-state").textContent = `No measurements: ${error.message}`;
    }
    if (poll === this.#polls) this.#timer = setTimeout(() => this.#poll(), wait); // else a newer one goes on
  }

  #take(samples) {
    const at = performance.now() / 1000;
    this.#samples.push({ at, samples: byModel(samples) });
    while (this.#samples[0].at < at - SPAN - 5) this.#samples.shift();
    if (!byId("view-metrics").hidden) this.#draw();
  }

  #draw() {
    const model = this.#models.selected?.measuredAs;
    const readings = this.#samples
      .filter(({ samples }) => samples.has(model))
      .map(({ at, samples }) => ({ at, ...samples.get(model) }));
    const end = this.#samples.at(-1)?.at ?? SPAN;
    PLOTS.forEach(([, , , read], index) => {
      const points = readings.map((now, place) => [now.at, read(now, readings[place - 1]) ?? null]);
      this.#plots[index].draw(points.filter(([when]) => when >= end - SPAN), end - SPAN, end);
    });
  }
}

const READ = {
  modelbay_sequences_running: "running",
  modelbay_sequences_waiting: "waiting",
  modelbay_kv_cache_usage_ratio: "kv",
  modelbay_generation_tokens_total: "tokens",
  modelbay_time_to_first_token_seconds_sum: "firstSum",
  modelbay_time_to_first_token_seconds_count: "firstCount",
  modelbay_prefix_cache_hit_tokens_total: "cached",
  modelbay_prefix_cache_query_tokens_total: "lookedUp",
};

/** The readings of each model. One that is not loaded has none of an engine: then nothing runs. */
function byModel(samples) {
  const models = new Map();
  for (const { name, labels, value } of samples) {
    if (!(name in READ) || labels.model === undefined) continue;
    if (!models.has(labels.model)) models.set(labels.model, Object.fromEntries(Object.values(READ).map((key) => [key, 0])));
    models.get(labels.model)[READ[name]] = value;
  }
  return models;
}

/** The mean of what was observed between two readings; null where nothing was. */
function mean(now, before, sum, counted) {
  const more = now[counted] - before[counted];
  return more > 0 ? (now[sum] - before[sum]) / more : null;
}
