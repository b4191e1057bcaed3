// Elements from data. Text goes in as text nodes and nowhere else, so nothing that a model says can become markup.

/** An element with properties (`class`, `aria-…`, `data-…` and other attributes) and children (nodes or texts). */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, String(value));
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** A table. On narrow screens its rows become blocks, so the roles are said outright and each cell carries its heading. */
export function table(caption, headings, groups) {
  const head = el("tr", { role: "row" });
  for (const heading of headings) head.append(el("th", { scope: "col", role: "columnheader" }, heading));
  const made = el("table", { role: "table" },
    el("caption", { class: "visually-hidden" }, caption), el("thead", { role: "rowgroup" }, head));
  for (const { title, rows } of groups) {
    const body = el("tbody", { role: "rowgroup" });
    if (title) {
      body.append(el("tr", { role: "row", class: "group" },
        el("th", { scope: "rowgroup", role: "rowheader", colspan: headings.length }, title)));
    }
    for (const row of rows) body.append(tableRow(headings, row));
    made.append(body);
  }
  return made;
}

function tableRow(headings, { cells, mark }) {
  const made = el("tr", { role: "row", class: mark ?? null });
  cells.forEach((content, index) => {
    const attributes = { "data-heading": headings[index] };
    const parts = Array.isArray(content) ? content : [content];
    made.append(index === 0
      ? el("th", { scope: "row", role: "rowheader", ...attributes }, ...parts)
      : el("td", { role: "cell", ...attributes }, ...parts));
  });
  return made;
}
