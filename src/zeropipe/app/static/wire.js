// Talking to the server: the newest question counts, older answers are dropped.

/** What the server refused, field by field; `again` are the seconds after which it may be asked once more. */
export class Refused extends Error {
  constructor(errors, again = 0) {
    super(errors.map(({ message }) => message).join("\n"));
    this.errors = errors;
    this.again = again;
  }
}

export async function get(path) {
  return (await answered(path, {})).json();
}

/** Send a text as it is, anything else as JSON. */
export async function post(path, body, signal) {
  const [type, text] = typeof body === "string" ? ["text/plain", body] : ["application/json", JSON.stringify(body)];
  return answered(path, { method: "POST", headers: { "Content-Type": type }, body: text, signal });
}

async function answered(path, request) {
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused([{ field: "", message: "the server does not answer: is `zeropipe app` still running?" }]);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const errors = told?.errors ?? [{ field: "", message: `the server answered with status ${response.status}` }];
  throw new Refused(errors, Number(response.headers.get("Retry-After") ?? 0));
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
