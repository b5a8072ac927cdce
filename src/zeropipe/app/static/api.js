// Calls to the server.

/** The server refused a request: errors by field, and after how many seconds it may be sent again (0: not at all). */
export class RequestError extends Error {
  constructor(errors, retryAfter = 0) {
    super(errors.map(({ message }) => message).join("\n"));
    this.errors = errors;
    this.retryAfter = retryAfter;
  }
}

export async function get(path) {
  return (await fetchChecked(path, {})).json();
}

/** Send a string as text, anything else as JSON. */
export async function post(path, body, signal) {
  const [type, text] = typeof body === "string" ? ["text/plain", body] : ["application/json", JSON.stringify(body)];
  return fetchChecked(path, { method: "POST", headers: { "Content-Type": type }, body: text, signal });
}

async function fetchChecked(path, request) {
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError([{ field: "", message: "the server does not answer: is `zeropipe app` still running?" }]);
  }
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  const errors = content?.errors ?? [{ field: "", message: `the server answered with status ${response.status}` }];
  throw new RequestError(errors, Number(response.headers.get("Retry-After") ?? 0));
}

/** Calls of one path of which only the latest counts: sending a new one cancels the one before. */
export class LatestCall {
  constructor(path) {
    this.path = path;
    this.number = 0;
  }

  /** Return the answer, or null if a newer call was sent meanwhile. */
  async send(body) {
    this.cancel();
    const { number } = this;
    this.controller = new AbortController();
    try {
      const response = await post(this.path, body, this.controller.signal);
      const answer = await response.json();
      return number === this.number ? answer : null;
    } catch (error) {
      if (number !== this.number || error.name === "AbortError") return null;
      throw error;
    }
  }

  cancel() {
    this.number++;
    this.controller?.abort();
  }
}
