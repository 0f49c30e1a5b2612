// The stream of steps, the frames kept of it, and replay. What is drawn of a frame is in view.js.

import { ask, events, setKey } from "./sse.js";
import { setModel, startChat } from "./chat.js";
import { startCompare } from "./compare.js";
import { drawNumbers, drawPictures, say, setEngine, startView } from "./view.js";

const $ = (id) => document.getElementById(id);
const MOST_FRAMES = 600;
const STRIP = 200; // steps in the strip
const WINDOW = 2; // seconds over which tokens per second are counted
const STAY = 1.5; // seconds that an ended row stays
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let frames = [];
let frozen = null; // the frames when the replay began, or null: live
let at = 0; // which of them is shown
let past = { lines: [], first: [], gone: [], running: [] };

const shown = () => (frozen ? frozen[at] : frames.at(-1));

/** One message of the server with all that is shown of it, so that a replay shows what was shown live. */
function makeFrame(message) {
  const lines = [...past.lines, ...message.lines].slice(-400);
  const recent = lines.filter(([, end]) => end > message.time - WINDOW);
  const since = recent.length ? Math.max(message.time - WINDOW, recent[0][1] - recent[0][2]) : message.time;
  const made = recent.reduce((sum, line) => sum + line[5], 0);
  const first = [...past.first, ...message.first].slice(-32);
  const present = new Set([...message.running, ...message.waiting, ...message.ended].map((one) => one.id));
  const left = past.running.filter((one) => !present.has(one.id) && !message.n_waiting)
    .map((one) => ({ ...one, reason: "abort" })); // no step tells of those whose client has left
  const gone = [...past.gone, ...[...message.ended, ...left].map((one) => ({ ...one, at: message.time }))]
    .filter((one) => one.at > message.time - STAY).slice(-8);
  past = { lines, first, gone, running: message.running };
  return {
    ...message,
    gone,
    lines: lines.slice(-STRIP),
    rate: message.time > since ? made / (message.time - since) : 0,
    ttft: first.length ? [...first].sort((a, b) => a - b)[Math.floor((first.length - 1) / 2)] : null,
    idle: !message.running.length && !message.n_waiting,
  };
}

function take(message) {
  frames.push(makeFrame(message));
  if (frames.length > MOST_FRAMES) frames.shift();
  if (!frozen) pictures.soon();
  numbers.soon();
}

/** Acts at most once in that many milliseconds, and always after the last call. */
function throttled(milliseconds, act) {
  let next = 0;
  let timer;
  const go = () => {
    clearTimeout(timer);
    timer = undefined;
    next = performance.now() + milliseconds();
    act();
  };
  return { now: go, soon: () => { timer ??= setTimeout(go, Math.max(0, next - performance.now())); } };
}

const pictures = throttled(() => (calm.matches ? 500 : 30), () => { if (shown()) drawPictures(shown()); });
const numbers = throttled(() => (calm.matches ? 1000 : 400), () => {
  if (shown()) drawNumbers(shown());
  drawSlider();
});

function drawSlider() {
  const all = frozen ?? frames;
  const slider = $("slider");
  slider.disabled = !all.length;
  slider.max = Math.max(0, all.length - 1);
  slider.value = frozen ? at : all.length - 1;
  const note = frozen ? `step ${shown().step}` : "live";
  slider.setAttribute("aria-valuetext", note);
  $("slider-note").textContent = note;
  $("pause").textContent = frozen ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", String(Boolean(frozen)));
}

function show() {
  pictures.now();
  numbers.now();
}

function startReplay() {
  $("pause").addEventListener("click", () => {
    frozen = frozen || !frames.length ? null : frames.slice();
    at = frozen ? frozen.length - 1 : 0;
    show();
  });
  $("slider").addEventListener("input", () => {
    frozen ??= frames.slice();
    at = Math.min(Number($("slider").value), frozen.length - 1);
    show();
  });
  $("say").addEventListener("click", say);
  setInterval(() => { if ($("say-often").checked) say(); }, 1000);
}

// ---- the connection

function link(text, good) {
  $("link").textContent = text;
  $("link").classList.toggle("good", Boolean(good));
}

let useKey = () => {};

function askForKey() {
  $("key-form").hidden = false;
  return new Promise((resolve) => { useKey = resolve; });
}

function begin(engine) {
  frames = [];
  frozen = null;
  past = { lines: [], first: [], gone: [], running: [] };
  $("model").textContent = engine.model;
  $("key-form").hidden = true;
  setModel(engine.model);
  setEngine(engine);
  link("connected", true);
  drawSlider();
}

async function follow() {
  for (let wait = 1; ; wait = Math.min(2 * wait, 8)) {
    let why = "the connection was lost";
    try {
      for await (const { event, data } of events(await ask("live/steps"))) {
        const message = JSON.parse(data);
        if (event === "engine") { begin(message); wait = 1; }
        else if (event === "step") take(message);
        else if (event === "end") why = message.reason;
      }
    } catch (error) {
      if (error.status === 401) {
        link("an API key is needed");
        await askForKey();
        wait = 0.5;
        continue;
      }
      if (error.status) why = error.message;
    }
    link(`${why}; trying again`);
    await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
  }
}

// ---- the two views

function route() {
  const policies = location.hash === "#policies";
  $("view-live").hidden = policies;
  $("view-policies").hidden = !policies;
  for (const [id, current] of [["to-live", !policies], ["to-policies", policies]]) {
    if (current) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  if (policies) compare.open();
  else if (shown()) show();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  useKey();
});
const compare = startCompare(calm, askForKey);
addEventListener("hashchange", route);
startView();
startReplay();
startChat(askForKey);
route();
follow();
