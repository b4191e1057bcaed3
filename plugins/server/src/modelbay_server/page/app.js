// What is on the page, and which part of it is shown: the one that the address names behind its #.

import { Api } from "./api.js";
import { CatalogueView } from "./catalogue.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { MetricsView } from "./metrics.js";
import { Models } from "./models.js";
import { TraceView } from "./trace.js";

const api = new Api();
const models = new Models(api);
const views = {
  chat: new Chat(api, models),
  trace: new TraceView(api, models),
  metrics: new MetricsView(api, models),
  plugins: new CatalogueView(api),
};
let current = "chat";

/** Do it, and say on the page what went wrong, if anything. */
async function tried(work) {
  const notice = byId("notice");
  try {
    await work();
    notice.hidden = true;
  } catch (error) {
    notice.textContent = error.message;
    notice.hidden = false;
    if (error.status === 401) byId("settings").open = true;
  }
}

function show(name, focus) {
  if (!(name in views)) return; // such as the skip link's
  current = name;
  for (const view of Object.keys(views)) byId(`view-${view}`).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (focus) byId(name === "chat" ? "prompt" : `${name}-title`).focus();
  refresh();
}

function refresh() {
  return tried(() => (models.selected ? views[current].shown?.() : models.load())); // a load is a change, and comes back here
}

addEventListener("hashchange", () => show(location.hash.slice(1), true));
models.addEventListener("change", refresh);

const key = byId("key");
key.value = api.key;
key.addEventListener("change", () => {
  api.key = key.value.trim();
  tried(() => models.load());
});
byId("sampling").addEventListener("submit", (event) => event.preventDefault());

const wide = matchMedia("(min-width: 60rem)");
const fold = () => { byId("settings").open = wide.matches; };
wide.addEventListener("change", fold);
fold();

show(location.hash.slice(1) in views ? location.hash.slice(1) : "chat", false);
