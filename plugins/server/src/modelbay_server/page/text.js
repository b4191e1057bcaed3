// What a model says, put on the page as it comes: text, and blocks of code between fences. It is never read as markup.

import { el } from "./dom.js";

const OPENS = /^ {0,3}```+\s*([\w+#.-]*)\s*$/;
const CLOSES = /^ {0,3}```+\s*$/;

export class GrowingText {
  #target;
  #node = null; // the text node that grows
  #code = false;
  #held = ""; // the beginning of a line that may still become a fence
  #inLine = false; // whether part of the line is shown already

  /** Blocks are appended to `target`. */
  constructor(target) {
    this.#target = target;
  }

  append(text) {
    this.#held += text;
    for (let end; (end = this.#held.indexOf("\n")) >= 0;) {
      const line = this.#held.slice(0, end);
      this.#held = this.#held.slice(end + 1);
      this.#line(line);
    }
    if (this.#held && (this.#inLine || !mayBecomeFence(this.#held))) this.#show();
  }

  /** No more comes: what was held back is shown. */
  end() {
    if (!this.#inLine && this.#isFence(this.#held)) this.#turn(this.#held);
    else if (this.#held) this.#show();
  }

  #show() {
    this.#write(this.#held);
    this.#held = "";
    this.#inLine = true;
  }

  #line(line) {
    if (!this.#inLine && this.#isFence(line)) this.#turn(line);
    else this.#write(`${line}\n`);
    this.#inLine = false;
  }

  #isFence(line) {
    return (this.#code ? CLOSES : OPENS).test(line);
  }

  #turn(fence) {
    this.#code = !this.#code;
    this.#node = null;
    if (this.#code) this.#begin(OPENS.exec(fence)[1]);
  }

  #write(text) {
    // Blocks have their own distance: empty lines before a paragraph would double it.
    if (!this.#code && !this.#node?.data) text = text.replace(/^\n+/, "");
    if (!text) return;
    if (this.#node === null) this.#begin("");
    this.#node.appendData(text);
  }

  #begin(language) {
    this.#node = document.createTextNode("");
    if (this.#code) {
      const label = language ? `Code, ${language}` : "Code";
      const block = el("pre", { tabindex: 0, role: "group", "aria-label": label, dir: "ltr" }, el("code", {}, this.#node));
      this.#target.append(block);
    } else {
      this.#target.append(el("p", { dir: "auto" }, this.#node));
    }
  }
}

function mayBecomeFence(line) {
  return /^ {0,3}(`{0,2}|```+\s*[\w+#.-]*\s*)$/.test(line);
}

/** Says what comes to those who listen: by sentences, since single tokens would be a stutter. */
export class Announcer {
  #region;
  #held = "";

  constructor(region) {
    this.#region = region;
  }

  begin() {
    this.#region.replaceChildren();
    this.#held = "";
  }

  append(text) {
    this.#held += text;
    const sentences = /^[^]*(?:[.!?:;]\s|\n)/.exec(this.#held);
    if (sentences) this.#say(sentences[0]);
  }

  end(note = "") {
    this.#say(`${this.#held} ${note}`);
  }

  #say(text) {
    this.#held = this.#held.slice(text.length);
    if (text.trim()) this.#region.append(el("p", {}, text.trim()));
  }
}
