// Talking to the server: the newest question counts, older answers are dropped.

/** What the server refused, field by field. */
export class Refused extends Error {
  constructor(errors, status) {
    super(errors.map(({ message }) => message).join("\n"));
    this.errors = errors;
    this.status = status;
  }
}

/** Send a text as it is, anything else as JSON. */
export async function post(path, body, signal) {
  const [type, text] = typeof body === "string" ? ["text/plain", body] : ["application/json", JSON.stringify(body)];
  let response;
  try {
    response = await fetch(path, { method: "POST", headers: { "Content-Type": type }, body: text, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused([{ field: "", message: "the server does not answer: is `zeropipe app` still running?" }], 0);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refused(told?.errors ?? [{ field: "", message: `the server answered with status ${response.status}` }], response.status);
}

/** A line to one call: asking again ends the question before, and only the last one's answer is given on. */
export class Line {
  constructor(path) {
    this.path = path;
    this.turn = 0;
  }

  /** The answer, or null where a newer question has taken its place. */
  async ask(body) {
    this.drop();
    const { turn } = this;
    this.ending = new AbortController();
    try {
      const response = await post(this.path, body, this.ending.signal);
      const answer = await response.json();
      return turn === this.turn ? answer : null;
    } catch (error) {
      if (turn !== this.turn || error.name === "AbortError") return null;
      throw error;
    }
  }

  /** Give up whatever is asked. */
  drop() {
    this.turn++;
    this.ending?.abort();
  }
}
