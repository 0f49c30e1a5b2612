// One frame of the batch as rows, table, strip, grid and words. A frame holds all that is shown: nothing is kept here
// but elements, so drawing the same frame again gives the same picture.

const $ = (id) => document.getElementById(id);
const ROW = 26; // pixels from one row to the next
const SIGNS = { waiting: "○", again: "↺", prefill: "▤", decode: "▶", ended: "■" };
const SVG_HEIGHT = 72;
const MOST_CELLS = 1024; // of larger memories, only what is held is drawn block by block
const NOTHING = { running: [], waiting: [], gone: [], lines: [], blocks: null };

let engine = { budget: 1, max_running: 0, n_blocks: 0, block_size: 0, drawn: false };
let cells = [];
let chosen = null; // id of the request whose blocks are outlined
let last = null; // the frame drawn

export function startView() {
  for (const [id, table] of [["as-rows", false], ["as-table", true]]) {
    $(id).addEventListener("click", () => {
      $("rows-box").hidden = table;
      $("table-box").hidden = !table;
      $("as-rows").setAttribute("aria-pressed", String(!table));
      $("as-table").setAttribute("aria-pressed", String(table));
      if (last) drawTable(last);
    });
  }
  new ResizeObserver(() => last && drawStrip(last)).observe($("strip"));
}

export function setEngine(told) {
  engine = told;
  last = null;
  rows.clear();
  $("rows").replaceChildren();
  $("t-most").textContent = `of ${engine.max_running}`;
  $("budget-note").textContent =
    `The last 200 steps, the newest at the right; the whole height is ${engine.budget} tokens.`;
  cells = [];
  $("grid").replaceChildren();
  $("grid-box").hidden = !engine.drawn || !engine.n_blocks;
  $("max-tokens").max = engine.max_len;
  drawGrid(NOTHING, owners(NOTHING));
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const count = (n) => n.toLocaleString("en");
const seconds = (s) => (s == null ? "–" : s < 0.9995 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(2)} s`);
const span = (runs) => runs.reduce((sum, [, n]) => sum + n, 0);

/** Of the row of the slot table: A to Z, a to z, then two letters. Each is one request's for as long as it runs. */
export function letter(row) {
  const one = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  return row < 52 ? one[row] : one[(Math.floor(row / 26) - 2) % 26] + one[26 + (row % 26)];
}

function owners(frame) {
  const held = new Uint16Array(engine.n_blocks);
  const by = new Int32Array(engine.n_blocks).fill(-1);
  for (const request of frame.running) {
    for (const [first, n] of request.blocks) {
      for (let block = first; block < first + n; block++) {
        held[block]++;
        by[block] = request.row;
      }
    }
  }
  return { held, by };
}

// ---- what everything is, in one list

function listed(frame, held) {
  const running = [...frame.running].sort((a, b) => a.row - b.row).map((one) => {
    const state = one.prompt + one.output - one.computed > 1 || !one.output ? "prefill" : "decode";
    let shared = 0;
    for (const [first, n] of one.blocks) for (let b = first; b < first + n; b++) shared += held[b] > 1;
    return { ...one, state, tag: letter(one.row), hue: 1 + (one.row % 8), held: span(one.blocks), shared };
  });
  const waiting = frame.waiting.map((one) => ({ ...one, state: one.again ? "again" : "waiting", computed: 0 }));
  const gone = frame.gone.map((one) => ({ ...one, state: "ended", computed: one.prompt + one.output }));
  return [...running, ...waiting, ...gone];
}

function words(one, long = false) {
  const samples = long && one.samples ? `, ${one.samples} more samples wait for it` : "";
  switch (one.state) {
    case "waiting": return `waits: prompt of ${one.prompt}${samples}`;
    case "again": return `sent away with ${one.output} tokens, waits`;
    case "prefill": return `prompt ${one.computed} of ${one.prompt + one.output}${samples}`;
    case "decode": return `${one.output} tokens`;
    default: return `${{ length: "full length", stop: "stopped", abort: "client left" }[one.reason] ?? one.reason}: ${one.output} tokens`;
  }
}

// ---- rows

const rows = new Map(); // id -> elements

function makeRow(id) {
  const row = { li: element("li", "row"), tag: element("button", "tag"), id: element("span", "id", `#${id}`),
    sign: element("span", "sign"), track: element("span", "track"), done: element("span", "done"),
    ticks: element("span", "ticks"), words: element("span", "words") };
  row.tag.type = "button";
  row.tag.addEventListener("click", () => { chosen = chosen === id ? null : id; if (last) drawPictures(last); });
  const prompt = element("span", "prompt");
  prompt.append(row.done);
  row.track.append(prompt, row.ticks);
  row.track.setAttribute("aria-hidden", "true");
  row.sign.setAttribute("aria-hidden", "true");
  row.li.append(row.tag, row.id, row.sign, row.track, row.words);
  $("rows").append(row.li);
  rows.set(id, row);
  return row;
}

function drawRows(frame, list) {
  const seen = new Set();
  list.forEach((one, i) => {
    seen.add(one.id);
    const row = rows.get(one.id) ?? makeRow(one.id);
    row.li.style.transform = `translateY(${i * ROW}px)`;
    row.li.dataset.state = one.state;
    row.li.dataset.hue = one.hue ?? 0;
    set(row.tag, one.tag ?? "");
    row.tag.disabled = !one.tag;
    row.tag.setAttribute("aria-label", one.tag ? `Outline the blocks of request ${one.id}, letter ${one.tag}` : "no row");
    row.tag.setAttribute("aria-pressed", String(one.id === chosen));
    set(row.sign, SIGNS[one.state]);
    row.done.style.width = `${(100 * one.computed) / Math.max(1, one.prompt + (one.state === "prefill" ? one.output : 0))}%`;
    row.ticks.style.setProperty("--n", one.output);
    set(row.words, words(one));
  });
  for (const [id, row] of rows) {
    if (!seen.has(id)) {
      row.li.remove();
      rows.delete(id);
    }
  }
  $("rows").style.height = `${list.length * ROW}px`;
  const more = frame.n_waiting - frame.waiting.length;
  set($("rows-more"), !list.length ? "Nothing to do. Send something." : more > 0 ? `and ${count(more)} more that wait` : "");
}

// ---- table

function drawTable(frame) {
  if ($("table-box").hidden) return;
  const list = listed(frame, owners(frame).held);
  const body = $("table").tBodies[0];
  while (body.rows.length > list.length) body.deleteRow(-1);
  list.forEach((one, i) => {
    const line = body.rows[i] ?? body.insertRow();
    const values = [`#${one.id}`, one.tag ?? "", words(one, true), one.prompt, one.computed, one.output, one.step ?? 0, one.held ?? 0,
      one.shared ?? 0];
    values.forEach((value, column) => {
      const cell = line.cells[column] ?? line.insertCell();
      if (column > 2) cell.className = "n";
      set(cell, String(value));
    });
  });
}

// ---- strip

function drawStrip(frame) {
  const svg = $("strip");
  const width = Math.max(1, Math.round(svg.clientWidth));
  svg.setAttribute("viewBox", `0 0 ${width} ${SVG_HEIGHT}`);
  const bar = width / 200;
  let decode = "";
  let prefill = "";
  frame.lines.forEach(([, , , decoded, prompts], i) => {
    const x = width - (frame.lines.length - i) * bar;
    const box = (from, tokens) => {
      const height = Math.max(2, (SVG_HEIGHT * tokens) / engine.budget); // a single token is seen as well
      return `M${x.toFixed(2)} ${(SVG_HEIGHT - (SVG_HEIGHT * from) / engine.budget).toFixed(2)}` +
        `v${(-height).toFixed(2)}h${(bar * 0.85).toFixed(2)}v${height.toFixed(2)}z`;
    };
    if (decoded) decode += box(0, decoded);
    if (prompts) prefill += box(decoded, prompts);
  });
  $("strip-decode").setAttribute("d", decode);
  $("strip-prefill").setAttribute("d", prefill);
}

// ---- grid

function drawGrid(frame, { held, by }) {
  const kept = new Uint8Array(engine.n_blocks);
  for (const [first, n] of frame.blocks?.kept ?? []) kept.fill(1, first, first + n);
  const mine = new Uint8Array(engine.n_blocks);
  for (const [first, n] of frame.running.find((one) => one.id === chosen)?.blocks ?? []) mine.fill(1, first, first + n);
  let used = 0;
  const put = (kind, text, hue = 0, outlined = false) => {
    cells[used] ??= $("grid").appendChild(element("span", ""));
    const cell = cells[used++];
    set(cell, text);
    const name = `cell ${kind}${outlined ? " mine" : ""}`;
    if (cell.className !== name) cell.className = name;
    if (cell.dataset.hue !== String(hue)) cell.dataset.hue = hue;
  };
  for (let i = 0; i < engine.n_blocks; i++) {
    const n = held[i];
    if (n > 1) put("shared", n > 99 ? "+" : String(n), 0, mine[i]);
    else if (n) put("own", letter(by[i]), 1 + (by[i] % 8), mine[i]);
    else if (engine.n_blocks > MOST_CELLS) { // of large memories, what nobody holds is drawn as gaps
      const first = i;
      let keeps = 0;
      for (; i < engine.n_blocks && !held[i]; i++) keeps += kept[i];
      const free = i - first - keeps;
      put("gap", [keeps && `${count(keeps)} kept`, free && `${count(free)} free`].filter(Boolean).join(", "));
      i--;
    } else put(kept[i] ? "cached" : "free", kept[i] ? "·" : "");
  }
  while (cells.length > used) cells.pop().remove();
}

export function drawPictures(frame) {
  last = frame;
  const own = owners(frame);
  drawRows(frame, listed(frame, own.held));
  drawStrip(frame);
  if (engine.drawn) drawGrid(frame, own);
}

// ---- numbers and words

export function summary(frame) {
  const [, , , decoded, prompts] = frame.lines.at(-1) ?? [0, 0, 0, 0, 0];
  const blocks = frame.blocks
    ? `, ${count(frame.blocks.held)} of ${count(engine.n_blocks)} blocks held, ${count(frame.blocks.shared)} shared` : "";
  return `step ${frame.step || "–"}: ${frame.running.length} running, ${count(frame.n_waiting)} waiting, ` +
    `${count(decoded + prompts)} of ${engine.budget} tokens in the step${blocks}`;
}

export function drawNumbers(frame) {
  const line = frame.lines.at(-1);
  set($("step-number"), frame.step ? count(frame.step) : "–");
  set($("t-running"), String(frame.running.length));
  set($("t-waiting"), count(frame.n_waiting));
  set($("t-rate"), frame.idle ? "idle" : count(Math.round(frame.rate)));
  set($("t-ttft"), seconds(frame.ttft));
  set($("t-took"), line ? seconds(line[2]) : "–");
  const blocks = frame.blocks;
  set($("t-found"), blocks?.asked ? `${Math.round((100 * blocks.found) / blocks.asked)} %` : "–");
  set($("twin"), summary(frame));
  set($("blocks-note"), !blocks ? "This engine keeps one region for each request, and no blocks."
    : `${count(blocks.held)} of ${count(engine.n_blocks)} blocks of ${engine.block_size} tokens held, ${count(blocks.shared)} of ` +
      `them shared; ${count(blocks.cached)} kept for whoever begins the same; ${count(blocks.free)} free.` +
      (engine.drawn ? "" : " Too many to draw each."));
  $("grid").setAttribute("aria-label", $("blocks-note").textContent);
  drawTable(frame);
}

export function say() {
  $("announce").textContent = $("twin").textContent;
}
