// The chat box, and the button that fills the batch. What comes from a model or a user is set as text, never as HTML.

import { ask, events } from "./sse.js";

const $ = (id) => document.getElementById(id);
const hint = $("log-hint");
let turns = []; // of the conversation, as the API takes them
let model = "";
let running = null; // AbortController of the answer in the making
let onDenied = () => {};

export const setModel = (name) => { model = name; };

export function startChat(denied) {
  onDenied = denied;
  $("chat").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  $("fill").addEventListener("click", fill);
}

function clear() {
  running?.abort();
  turns = [];
  $("log").replaceChildren(hint);
}

function bubble(role, text) {
  const box = document.createElement("div");
  box.className = `turn ${role}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = { user: "You", assistant: model || "Model", error: "Error" }[role];
  const words = document.createElement("p");
  words.textContent = text;
  box.append(who, words);
  hint.remove();
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return words;
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("log").setAttribute("aria-busy", String(on)); // a screen reader waits for the whole answer
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  const talk = turns; // "Clear" begins another
  talk.push({ role: "user", content: text });
  bubble("user", text);
  const mine = (running = new AbortController());
  busy(true);
  const words = bubble("assistant", "");
  let answer = "";
  try {
    const body = { model, messages: talk, stream: true, temperature: 0, max_tokens: Number($("max-tokens").value) || 160 };
    await chunks(body, mine.signal, (piece) => {
      answer += piece;
      words.textContent = answer;
      $("log").scrollTop = $("log").scrollHeight;
    });
  } catch (error) {
    if (error.name !== "AbortError") {
      bubble("error", error.message);
      if (error.status === 401) onDenied();
    }
  } finally {
    if (answer) talk.push({ role: "assistant", content: answer });
    else { talk.pop(); words.parentElement.remove(); }
    if (running === mine) running = null;
    busy(Boolean(running));
  }
}

async function chunks(body, signal, take) {
  const response = await ask("v1/chat/completions", { body, signal });
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices ?? []) take(choice.delta?.content ?? "");
  }
}

// A browser opens six connections to one host: one is for the steps and one for the chat, so these are four.
const SYSTEM = "You are a careful guide in a museum of the sea. Visitors of every age ask you short questions. " +
  "You answer in plain words, you give one example that can be seen with the naked eye, you say where it can be " +
  "seen, and you end with a question that makes the visitor look again. ";
const QUESTIONS = [
  "Why does the tide come twice a day?",
  "What is under the ice in winter? " + "I saw a picture of a diver with a lamp, a seal and a hole in the ice. ".repeat(8),
  "How does a lighthouse lamp reach so far? " + "The keeper spoke of a lens made of many rings of glass. ".repeat(24),
  "Who lives in an empty shell?",
];

async function fill() {
  const note = $("fill-note");
  $("fill").disabled = true;
  note.textContent = "Twelve requests are on their way.";
  const outcomes = await Promise.allSettled(QUESTIONS.map((question, i) => chunks({
    model, stream: true, n: 3, temperature: 0.9, max_tokens: 60 + 45 * i,
    messages: [{ role: "system", content: SYSTEM }, { role: "user", content: question }],
  }, undefined, () => {})));
  const failed = outcomes.find((outcome) => outcome.status === "rejected");
  note.textContent = failed ? `Not all were answered: ${failed.reason.message}` : "All twelve have ended.";
  if (failed?.reason.status === 401) onDenied();
  $("fill").disabled = false;
}
