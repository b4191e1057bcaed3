// The conversation: what was said, the answer that comes in, and what stops it.

import { byId, el } from "./dom.js";
import { Announcer, GrowingText } from "./text.js";

const NEAR_THE_END = 48; // pixels

export class Chat {
  #api;
  #models;
  #messages = [];
  #running = null; // the AbortController of the answer that comes in
  #announcer = new Announcer(byId("spoken"));
  #follows = true;

  constructor(api, models) {
    this.#api = api;
    this.#models = models;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new").addEventListener("click", () => {
      this.clear();
      byId("prompt").focus();
    });
    byId("log").addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = byId("log");
      this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_THE_END;
    });
    models.addEventListener("change", () => this.#fit());
    this.clear();
  }

  /** End the answer that comes in. The server sees the connection close, and frees what the request held. */
  stop() {
    this.#running?.abort();
    byId("prompt").focus();
  }

  clear() {
    this.#running?.abort();
    this.#running = null;
    this.#messages = [];
    this.#announcer.begin();
    byId("log").replaceChildren(el("p", { class: "empty", id: "empty" }));
    this.#follows = true;
    this.#say("");
    this.#fit();
  }

  async #send() {
    const prompt = byId("prompt");
    const text = prompt.value;
    if (this.#running || !text.trim() || byId("send").disabled || !byId("sampling").reportValidity()) return;
    byId("empty")?.remove();
    this.#say("");
    prompt.value = "";
    prompt.focus();
    const asked = new Shown("user", "You");
    asked.append(text);
    asked.end();
    this.#messages.push({ role: "user", content: text });
    const messages = this.#messages;
    if (await this.#answer()) return;
    messages.pop();
    asked.remove();
    if (!prompt.value) prompt.value = text; // to try again
  }

  /** Whether there is an answer, or a part of one. */
  async #answer() {
    const running = (this.#running = new AbortController());
    const messages = this.#messages;
    const answer = new Shown("assistant", this.#models.selected.id);
    this.#fit();
    this.#follow(true);
    this.#announcer.begin();
    let failure = null;
    try {
      for await (const event of this.#api.stream("v1/chat/completions", this.#body(), running.signal)) {
        const text = answer.take(event);
        if (this.#running === running) this.#announcer.append(text);
        this.#follow();
      }
    } catch (error) {
      if (!running.signal.aborted) failure = error;
    }
    if (this.#running !== running) return true; // another conversation has begun meanwhile
    this.#running = null;
    const stopped = running.signal.aborted;
    const answered = answer.text !== "" || !(failure || stopped);
    if (answered) {
      const note = failure ? failure.message : answer.note(stopped);
      answer.end(note, failure !== null);
      this.#announcer.end(note);
      messages.push({ role: "assistant", content: answer.text });
    } else {
      answer.remove();
      this.#say(failure?.message ?? "");
    }
    if (failure?.status === 401) byId("settings").open = true;
    this.#fit();
    this.#follow();
    return answered;
  }

  /** What went wrong with the last message; nothing hides it. */
  #say(text) {
    byId("failure").textContent = text;
    byId("failure").hidden = !text;
  }

  #body() {
    const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);
    return {
      model: this.#models.selected.id,
      messages: this.#messages,
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
      seed: number("seed"),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /** Which buttons there are, and what an empty conversation says. */
  #fit() {
    const running = this.#running !== null;
    const model = this.#models.selected;
    const able = model?.task === "generate";
    byId("send").hidden = running;
    byId("send").disabled = !able;
    byId("stop").hidden = !running;
    byId("log").setAttribute("aria-busy", String(running));
    const empty = byId("empty");
    if (!empty) return;
    if (!model) empty.textContent = "No model yet.";
    else if (!able) empty.textContent = `${model.id} is served for ${model.task}: there is nothing to chat with.`;
    else empty.textContent = `Write to ${model.id}. It answers as the tokens come.`;
  }

  #follow(always = false) {
    if (!always && !this.#follows) return;
    this.#follows = true;
    requestAnimationFrame(() => byId("log").scrollTo({ top: byId("log").scrollHeight, behavior: "instant" }));
  }
}

/** One message on the page. */
class Shown {
  text = "";
  #element;
  #growing;
  #began = performance.now();
  #first = null;
  #usage = null;
  #reason = null;

  constructor(role, who) {
    const content = el("div", { class: "content" });
    this.#element = el("article", { class: `message ${role}`, "aria-label": who }, el("h2", { class: "who" }, who), content);
    this.#growing = new GrowingText(content);
    byId("log").append(this.#element);
    if (role === "assistant") this.#element.classList.add("waiting");
  }

  append(text) {
    this.text += text;
    this.#growing.append(text);
  }

  /** Show what a chunk of the stream brings; its text is returned. */
  take(event) {
    const choice = event.choices[0];
    const text = choice?.delta.content ?? "";
    if (text) {
      this.#first ??= performance.now();
      this.#element.classList.remove("waiting");
      this.append(text);
    }
    this.#reason = choice?.finish_reason ?? this.#reason;
    this.#usage = event.usage ?? this.#usage;
    return text;
  }

  /** How it ended, in words. */
  note(stopped) {
    const parts = [];
    if (stopped) parts.push("stopped");
    else if (this.#reason === "length") parts.push("ended at the most tokens that were allowed");
    else if (!this.text) parts.push("the model said nothing");
    const tokens = this.#usage?.completion_tokens;
    if (tokens !== undefined && this.#first !== null) {
      const seconds = (performance.now() - this.#first) / 1000;
      parts.push(`${tokens} tokens`, `first after ${Math.round(this.#first - this.#began)} ms`);
      if (tokens > 1 && seconds > 0) parts.push(`then ${((tokens - 1) / seconds).toFixed(1)} per second`);
    }
    return parts.join(", ");
  }

  end(note = "", failed = false) {
    this.#growing.end();
    this.#element.classList.remove("waiting");
    if (note) this.#element.append(el("p", { class: failed ? "ended failed" : "ended" }, note));
  }

  remove() {
    this.#element.remove();
  }
}
