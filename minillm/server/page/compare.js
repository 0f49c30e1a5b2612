// Three policies on the same arrivals, played over time. The server has simulated them; here they are only drawn.

import { ask } from "./sse.js";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const LANE = 20; // pixels of one slot
const MOST_CHIPS = 16;
const TITLES = { static: "Static", dynamic: "Dynamic", continuous: "Continuous" };

let run = null;
let asked = 0; // runs so far
let panels = [];
let drawnFor = 0; // pixels
let clock = 0; // seconds
let until = 1; // when the last policy ends
let playing = 0; // handle of the next frame
let calm = { matches: false };

export function startCompare(reduced, denied) {
  calm = reduced;
  const reload = () => load().catch((error) => {
    $("policy-error").textContent = error.message;
    if (error.status === 401) denied().then(reload);
  });
  $("policy-form").addEventListener("submit", (event) => { event.preventDefault(); reload(); });
  $("play").addEventListener("click", () => (playing ? pause() : play()));
  $("clock").addEventListener("input", () => { pause(); clock = (until * $("clock").value) / 1000; draw(); });
  new ResizeObserver(() => { if (run && $("lanes").clientWidth !== drawnFor) { build(); draw(); } }).observe($("lanes"));
  addEventListener("hashchange", () => { if (location.hash !== "#policies") pause(); });
  return { open: () => { if (!run) reload(); } };
}

async function load() {
  pause();
  $("policy-error").textContent = "";
  const query = new URLSearchParams(["seed", "slots", "requests"].map((name) => [name, $(name).value]));
  const mine = ++asked;
  const answer = await (await ask(`live/policies?${query}`)).json();
  if (mine !== asked) return; // another was asked for meanwhile
  run = answer;
  until = Math.max(...run.policies.map((policy) => policy.figures.makespan));
  build();
  figures();
  clock = calm.matches ? until : 0; // without motion, the end is shown first
  draw();
  if (!calm.matches) play();
}

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function part(name, className) {
  const made = document.createElement(name);
  made.className = className;
  return made;
}

function build() {
  const lanes = $("lanes");
  lanes.replaceChildren();
  drawnFor = lanes.clientWidth;
  const width = Math.max(200, drawnFor - 2); // two for its border
  const scale = width / until;
  panels = run.policies.map((policy) => {
    const box = part("section", "policy");
    const title = part("h3", "");
    title.textContent = TITLES[policy.name] ?? policy.name;
    const state = part("p", "soft state");
    const queue = part("p", "queue");
    const height = run.slots * LANE;
    const picture = svg("svg", { class: "lane", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    for (let slot = 0; slot < run.slots; slot++) {
      picture.append(svg("rect", { class: "idle", x: 0, y: slot * LANE + 1, width, height: LANE - 2 }));
    }
    const bars = policy.requests.map((one, i) => {
      const y = one.slot * LANE + 1;
      const work = svg("rect", { class: "work", x: one.start * scale, y, height: LANE - 2, width: 0 });
      const hold = svg("rect", { class: "hold", x: one.end * scale, y, height: LANE - 2, width: 0, fill: "url(#hatch)" });
      const label = svg("text", { class: "label", x: one.start * scale + 4, y: y + 13 });
      label.textContent = String(i + 1);
      picture.append(work, hold, label);
      return { work, hold, label };
    });
    const now = svg("line", { class: "now", y1: 0, y2: height });
    picture.append(now);
    box.append(title, state, queue, picture);
    lanes.append(box);
    return { policy, scale, state, queue, bars, now, picture };
  });
}

function draw() {
  for (const { policy, scale, state, queue, bars, now, picture } of panels) {
    let done = 0;
    let working = 0;
    let arrived = 0;
    const waiting = [];
    policy.requests.forEach((one, i) => {
      const width = (from, to) => Math.max(0, Math.min(clock, to) - from) * scale;
      bars[i].work.setAttribute("width", width(one.start, one.end));
      bars[i].hold.setAttribute("width", width(one.end, one.freed));
      bars[i].label.style.display = width(one.start, one.end) > 22 ? "" : "none";
      arrived += one.arrival <= clock;
      if (one.end <= clock) done++;
      else if (one.start <= clock) working++;
      else if (one.arrival <= clock) waiting.push(i + 1);
    });
    now.setAttribute("x1", Math.min(clock, until) * scale);
    now.setAttribute("x2", Math.min(clock, until) * scale);
    state.textContent = `${done} of ${policy.requests.length} ended, ${working} work, ${waiting.length} wait` +
      (done === policy.requests.length ? `: all ended at ${policy.figures.makespan.toFixed(1)} s` : "");
    picture.setAttribute("aria-label", `${TITLES[policy.name]} at ${clock.toFixed(1)} s: ${state.textContent}`);
    const chips = waiting.slice(0, MOST_CHIPS).map((number) => {
      const chip = part("span", "chip");
      chip.textContent = String(number);
      return chip;
    });
    queue.replaceChildren("Queue ", ...chips, waiting.length > MOST_CHIPS ? ` and ${waiting.length - MOST_CHIPS} more` : waiting.length ? "" : "empty");
  }
  $("clock").value = Math.round((1000 * clock) / until);
  const note = `${clock.toFixed(1)} of ${until.toFixed(1)} s`;
  $("clock-note").textContent = note;
  $("clock").setAttribute("aria-valuetext", note);
}

function figures() {
  const body = $("figures").tBodies[0];
  body.replaceChildren(...run.policies.map(({ name, figures: f }) => {
    const line = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = TITLES[name] ?? name;
    line.append(head, ...[`${f.mean_wait.toFixed(2)} s`, `${f.p95_wait.toFixed(2)} s`, `${f.makespan.toFixed(1)} s`,
      f.request_throughput.toFixed(2), `${Math.round(100 * f.idle_share)} %`].map((text) => {
      const cell = part("td", "n");
      cell.textContent = text;
      return cell;
    }));
    return line;
  }));
}

function play() {
  if (!run) return;
  if (clock >= until) clock = 0;
  let before = performance.now();
  const step = (time) => {
    const gone = (time - before) / 1000;
    if (!calm.matches || gone >= 1) { // without motion: once a second
      clock = Math.min(until, clock + Math.max(0, gone));
      before = time;
      draw();
    }
    if (clock >= until) pause();
    else playing = requestAnimationFrame(step);
  };
  playing = requestAnimationFrame(step);
  label(true);
}

function pause() {
  cancelAnimationFrame(playing);
  playing = 0;
  label(false);
}

function label(on) {
  $("play").textContent = on ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(on));
}
