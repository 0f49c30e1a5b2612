// Server-sent events by fetch and not by EventSource: that one can send neither a key nor a POST.

let key = "";
export const setKey = (value) => { key = value.trim(); };

/** A request with the key, if there is one. Throws a Failure for an answer that is no success. */
export async function ask(url, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(url, {
    method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
  });
  if (!response.ok) throw new Failure(response.status, await reason(response));
  return response;
}

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function reason(response) {
  try {
    const said = await response.json();
    const text = said?.error?.message ?? said?.detail;
    if (typeof text === "string") return text;
  } catch { /* no JSON: the status must do */ }
  return `the server answered ${response.status}`;
}

/** Yields { event, data } of a stream, in order; comments are left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split(/\r?\n\r?\n/);
      text = parts.pop();
      for (const part of parts) {
        let event = "message";
        const data = [];
        for (const line of part.split(/\r?\n/)) {
          if (line.startsWith("event:")) event = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
