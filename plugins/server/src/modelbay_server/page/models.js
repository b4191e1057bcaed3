// The models of the server, and the one that is chosen. Tells of a "change" when either changes.

import { byId, el } from "./dom.js";

export class Models extends EventTarget {
  #api;
  #cards = [];
  #select = byId("model");

  constructor(api) {
    super();
    this.#api = api;
    this.#select.addEventListener("change", () => this.#changed());
  }

  /** The chosen one's card, or undefined before there is any. */
  get selected() {
    return this.#cards.find((card) => card.id === this.#select.value);
  }

  async load() {
    const chosen = this.#select.value;
    const cards = (await this.#api.json("v1/models")).data;
    // One model may have several names; it is measured under the first of them.
    this.#cards = cards.map((card) => ({ ...card, measuredAs: cards.find(({ root }) => root === card.root).id }));
    this.#select.replaceChildren(...this.#cards.map((card) => el("option", { value: card.id }, label(card))));
    if (this.#cards.some((card) => card.id === chosen)) this.#select.value = chosen;
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function label({ id, task }) {
  return task === "generate" ? id : `${id} (${task})`;
}
