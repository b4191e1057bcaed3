// Small line plots: SVG for the eye, and the same in words.

import { el } from "./dom.js";

const WIDTH = 300, HEIGHT = 90;
const SVG = "http://www.w3.org/2000/svg";

export class Plot {
  #title;
  #format;
  #most;
  #value = el("p", { class: "value" }, "no data yet");
  #top = el("span", { class: "top" });
  #begin = el("span");
  #drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  #area = svg("path", { class: "area" });
  #line = svg("path", { class: "line" });

  /**
   * @param title what is plotted
   * @param format a value as text, with its unit
   * @param most the end of the axis, where it is fixed
   */
  constructor(title, format, most = null) {
    this.#title = title;
    this.#format = format;
    this.#most = most;
    for (const at of [0.5, HEIGHT / 2, HEIGHT - 0.5]) {
      this.#drawing.append(svg("path", { class: "grid", d: `M0 ${at}H${WIDTH}` }));
    }
    this.#drawing.append(this.#area, this.#line);
    this.element = el("figure", { class: "plot", "aria-label": title },
      el("figcaption", {}, title), this.#value, el("div", { class: "drawing" }, this.#top, this.#drawing),
      el("p", { class: "axis", "aria-hidden": "true" }, this.#begin, el("span", {}, "now")));
    this.draw([], 0, 0);
  }

  /** @param points `[seconds, value or null]` in order; @param begin @param end of the time axis, in seconds */
  draw(points, begin, end) {
    const known = points.filter(([, value]) => value !== null && Number.isFinite(value));
    const values = known.map(([, value]) => value);
    const most = this.#most ?? niceEnd(Math.max(0, ...values));
    this.#top.textContent = this.#format(most);
    this.#begin.textContent = end > begin ? `${Math.round(end - begin)} s ago` : "";
    const spots = known.map(([time, value]) => [
      round(((time - begin) / (end - begin)) * WIDTH),
      round(HEIGHT - 1 - (Math.min(value, most) / most) * (HEIGHT - 2)),
    ]);
    if (spots.length) spots.push([WIDTH, spots.at(-1)[1]]); // the last that is known holds until now
    const line = spots.map(([x, y]) => `${x} ${y}`).join("L");
    this.#line.setAttribute("d", spots.length ? `M${line}` : "");
    this.#area.setAttribute("d", spots.length ? `M${spots[0][0]} ${HEIGHT}L${line}V${HEIGHT}Z` : "");
    this.#value.textContent = values.length ? this.#format(values.at(-1)) : "no data yet";
    this.#drawing.setAttribute("aria-label", this.#words(values, Math.round(end - begin)));
  }

  #words(values, seconds) {
    if (!values.length) return `${this.#title}: no data yet`;
    const [now, least, most] = [values.at(-1), Math.min(...values), Math.max(...values)].map(this.#format);
    return `${this.#title} over the last ${seconds} seconds: now ${now}, lowest ${least}, highest ${most}`;
  }
}

/** The next of 1, 2, 5, 10, 20 … */
function niceEnd(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((end) => end >= value * 0.999);
}

function round(value) {
  return Math.round(value * 10) / 10;
}

function svg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
