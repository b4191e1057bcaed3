// The server's routes, as this page uses them. What goes wrong becomes an ApiError whose message is for people.

const KEY = "modelbay-key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Api {
  #key = "";

  constructor() {
    try {
      this.#key = sessionStorage.getItem(KEY) ?? "";
    } catch { /* browsers that keep nothing for this page throw */ }
  }

  get key() {
    return this.#key;
  }

  set key(value) {
    this.#key = value;
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch { /* it lasts as long as the page */ }
  }

  async json(path) {
    return (await this.#send(path)).json();
  }

  async text(path) {
    return (await this.#send(path)).text();
  }

  /** The events of a streamed answer. Leaving the loop or aborting the signal closes the connection. */
  async *stream(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await this.#send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    for await (const data of serverSentEvents(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(sentence(event.error.message));
      yield event;
    }
    throw new ApiError("The connection ended before the answer did.");
  }

  async #send(path, { headers = {}, ...options } = {}) {
    const key = this.#key;
    if (/[^!-~]/.test(key)) throw new ApiError("The API key has characters that no key can have.", 401);
    if (key) headers = { ...headers, Authorization: `Bearer ${key}` };
    const response = await reached(fetch(path, { ...options, headers, credentials: "omit", redirect: "error" }));
    if (!response.ok) throw new ApiError(await words(response, key), response.status);
    return response;
  }
}

/** What the browser says of a connection that failed is the same for every reason, and no help. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
}

async function words(response, key) {
  if (response.status === 401) {
    return key ? "The server does not accept this API key." : "This server asks for an API key: enter it in the settings.";
  }
  const said = await response.json().then((body) => body.error.message, () => "");
  if (response.status === 429) {
    const seconds = response.headers.get("Retry-After");
    return `The server is busy. Try again${seconds ? ` in ${seconds} s` : " soon"}.`;
  }
  return said ? sentence(said) : `The server answered ${response.status} and gave no reason.`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The data of each event of a text/event-stream body. Chunks may end anywhere, also inside a character. */
export async function* serverSentEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reached(reader.read());
      held += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const events = held.split(/\r?\n\r?\n/);
      held = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
