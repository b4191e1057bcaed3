// What is installed: the plugins, and the architectures that they serve.

import { byId, el, table } from "./dom.js";

export class CatalogueView {
  #api;
  #architectures = [];

  constructor(api) {
    this.#api = api;
    byId("architectures-filter").addEventListener("input", () => this.#draw());
    byId("architectures-all").addEventListener("change", () => this.#draw());
  }

  async shown() {
    const [plugins, architectures] = await Promise.all([
      this.#api.json("v1/modelbay/plugins"), this.#api.json("v1/modelbay/architectures"),
    ]);
    const rows = plugins.plugins.map(pluginRow);
    byId("plugins").replaceChildren(table("Plugins", ["Plugin", "Distribution", "State", "Registers"], [{ rows }]));
    this.#architectures = architectures.architectures;
    this.#draw();
  }

  #draw() {
    const wanted = byId("architectures-filter").value.trim().toLowerCase();
    const all = byId("architectures-all").checked;
    const listed = this.#architectures.filter((arch) => all || !arch.backend_only);
    const found = listed.filter((arch) => !wanted || JSON.stringify(arch).toLowerCase().includes(wanted));
    byId("architectures-count").textContent = `${found.length} of ${listed.length} architectures`;
    const headings = ["Architecture", "Tasks", "Owner", "Model types", "Parallel"];
    byId("architectures").replaceChildren(
      ...(found.length ? [table("Architectures", headings, [{ rows: found.map(architectureRow) }])] : []));
  }
}

function pluginRow({ name, distribution, version, status, hooks, error }) {
  const registers = error ?? (hooks.map((hook) => hook.replace(/^register_/, "").replaceAll("_", " ")).join(", ") || "nothing");
  const failed = status === "failed";
  const state = failed ? el("span", { class: "badge" }, status) : status;
  return { cells: [name, `${distribution} ${version}`, state, registers], mark: failed ? "warning" : null };
}

function architectureRow({ name, tasks, owner, version, model_types: types, parallel }) {
  const list = (values) => values.join(", ") || "none";
  return { cells: [name, list(tasks), `${owner} ${version}`, list(types), list(parallel)] };
}
