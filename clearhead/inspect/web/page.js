"use strict";
// Three views of one thing: all heads -> one head -> one cell. Rows of weights are computed here, from q, k and v.

const data = JSON.parse(document.getElementById("data").textContent);
const CIVIDIS = data.sequential, SIGNED = data.signed;
const LETTER = { "previous token": "prev", "first-token sink": "sink", induction: "induction", diagonal: "diagonal", uniform: "uniform", "": "" };
const state = { view: "all", map: 0, head: 0, i: 0, j: 0, span: null, at: [0, 0], tag: null };
const $ = (id) => document.getElementById(id);
const view = $("view");

// ---- small helpers

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "style") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const word = (text) => (text === "" ? "∅" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ /, "␣"));
const digits = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5 ? x.toFixed(4) : x.toExponential(2));
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) out[n] = raw.charCodeAt(n);
  return out;
}

// 16-bit floats, as NumPy writes them, times one scale
function halves(blob) {
  const raw = new Uint16Array(bytes(blob.data).buffer), out = new Float32Array(raw.length);
  for (let n = 0; n < raw.length; n++) {
    const h = raw[n], exponent = (h >> 10) & 31, fraction = h & 1023;
    const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    out[n] = (h & 0x8000 ? -size : size) * blob.scale;
  }
  return out;
}

function colour(share, stops = CIVIDIS) {
  const x = clamp(share, 0, 1) * (stops.length - 1), low = Math.min(Math.floor(x), stops.length - 2), part = x - low;
  return [0, 1, 2].map((n) => Math.round(stops[low][n] + part * (stops[low + 1][n] - stops[low][n])));
}

const TABLE = Array.from({ length: 256 }, (_, n) => colour(n / 255));

function shade(weight, top) {
  const kind = $("scale").value;
  const share = kind === "root" ? Math.sqrt(weight) : kind === "row" ? weight / (top || 1) : weight;
  return TABLE[Math.round(clamp(share, 0, 1) * 255)];
}

// ---- the numbers

const decoded = new Map();
function once(key, compute) {
  if (!decoded.has(key)) decoded.set(key, compute());
  return decoded.get(key);
}

function thumbnail(map, head) {
  const all = once(map.thumb, () => bytes(map.thumb)), size = map.thumbRows * map.thumbColumns;
  return all.subarray(head * size, (head + 1) * size);
}

// q, k and v of a head, or null where they were left out
function vectors(map, head) {
  const detail = map.detail[head];
  if (!detail) return null;
  const read = map.read[detail.group];
  return { K: map.K, U: map.U, scale: map.scale, q: once(detail.q, () => halves(detail.q)), k: once(read.k, () => halves(read.k)),
    v: once(read.v, () => halves(read.v)), bias: detail.bias && once(detail.bias, () => halves(detail.bias)) };
}

// which keys query i may read: runs [from, to) as one flat list
function runs(map, i) {
  if (map.mask === null) return [0, map.keys];
  const mask = data.masks[map.mask];
  const flat = once(mask.runs, () => new Int32Array(bytes(mask.runs).buffer)), starts = once(mask.starts, () => new Int32Array(bytes(mask.starts).buffer));
  return flat.subarray(starts[i], starts[i + 1]);
}

function score(map, head, x, i, j) {
  let sum = 0;
  for (let d = 0; d < x.K; d++) sum += x.q[i * x.K + d] * x.k[j * x.K + d];
  return sum * x.scale + bias(map, x, i, j);
}

// a bias is by distance (j − i + queries − 1), or whole
const bias = (map, x, i, j) => (!x.bias ? 0 : x.bias.length === map.queries * map.keys ? x.bias[i * map.keys + j] : x.bias[j - i + map.queries - 1]);

const rows = new Map();
function row(map, head, i) {
  const key = `${state.map}/${head}/${i}/${$("nofirst").checked}`;
  if (rows.has(key)) return rows.get(key);
  const x = vectors(map, head), weights = new Float32Array(map.keys), scores = new Float32Array(map.keys).fill(-Infinity);
  let top = -Infinity;
  const skip = $("nofirst").checked ? 1 : 0, may = runs(map, i);
  for (let n = 0; n < may.length; n += 2)
    for (let j = Math.max(may[n], skip); j < may[n + 1]; j++) {
      scores[j] = score(map, head, x, i, j);
      if (scores[j] > top) top = scores[j];
    }
  let total = 0;
  if (top > -Infinity) for (let j = 0; j < map.keys; j++) if (scores[j] > -Infinity) total += weights[j] = Math.exp(scores[j] - top);
  for (let j = 0; j < map.keys; j++) weights[j] /= total || 1;
  const found = { weights, scores, top, total, largest: weights.reduce((a, b) => Math.max(a, b), 0) };
  if (rows.size > 4096) rows.clear();
  rows.set(key, found);
  return found;
}

// ---- what things are called

const queries = (map) => (map.place === "encoder" ? data.source : data.labels);
const keys = (map) => map.keyNames || (map.place === "stack" || map.place === "decoder" ? data.labels : data.source);
const title = (map, head) => `${map.place === "stack" ? "" : map.place + " "}layer ${map.layer}, head ${map.heads[head].head}`;

function describe(map, head) {
  const found = map.heads[head], lines = [title(map, head) + (found.tag ? `: ${found.tag}` : "")];
  if (found.entropy !== null) lines.push(`entropy ${found.entropy.toFixed(2)} bits` + (found.distance === null ? "" : `, mean distance ${found.distance.toFixed(1)}`));
  for (const [tag, share] of Object.entries(found.scores)) if (share !== null) lines.push(`${tag === "uniform" ? "evenness" : tag} ${share.toFixed(2)}`);
  return lines.join("\n");
}

function tip(text, event) {
  $("tip").hidden = !text;
  if (!text) return;
  $("tip").textContent = text;
  const box = $("tip").getBoundingClientRect();
  $("tip").style.left = clamp(event.clientX + 14, 4, innerWidth - box.width - 6) + "px";
  $("tip").style.top = clamp(event.clientY + 14, 4, innerHeight - box.height - 6) + "px";
}

const say = (text) => { $("live").textContent = text; };

// ---- all heads

function drawAll() {
  const left = make("section"), right = make("section", { class: "side" });
  left.append(chips());
  if ($("nofirst").checked && data.maps.length) left.append(make("p", { class: "soft" }, `Thumbnails are ${[...new Set(data.maps.map(without))].join(" or ")}.`));
  for (const place of new Set(data.maps.map((map) => map.place))) {
    if (place !== "stack") left.append(make("h2", {}, { encoder: "encoder", decoder: "decoder, own tokens", cross: "decoder reads the source" }[place]));
    left.append(headsOf(place));
  }
  for (const line of data.unseen) left.append(make("p", { class: "soft" }, line));
  right.append(make("h2", {}, data.image ? "The image" : "The text"), data.image ? imageOf(null, null, 0) : textOf(null, null));
  if (data.next.length) right.append(make("h2", {}, data.nextTitle), barsOf(data.next.map(([text, share]) => [text, share, false])));
  for (const grid of data.grids) right.append(make("h2", {}, grid.title), gridOf(grid));
  view.replaceChildren(make("div", { class: "columns" }, left, right));
}

function chips() {
  const counts = {};
  for (const map of data.maps) for (const head of map.heads) counts[head.tag] = (counts[head.tag] || 0) + 1;
  const box = make("div", { class: "chips", role: "group" });
  for (const tag of Object.keys(LETTER).filter((tag) => counts[tag] && tag)) {
    const button = make("button", { onclick: () => { state.tag = state.tag === tag ? null : tag; draw(); } }, `${tag} ${counts[tag]}`);
    button.setAttribute("aria-pressed", state.tag === tag);
    box.append(button);
  }
  return box;
}

function headsOf(place) {
  const maps = data.maps.map((map, n) => [map, n]).filter(([map]) => map.place === place);
  const most = Math.max(...maps.map(([map]) => map.heads.length)), size = clamp(Math.floor(880 / most), 46, 120);
  const box = make("div", { class: "heads" });
  box.style.gridTemplateColumns = `max-content repeat(${most}, ${size}px)`;
  for (const [map, n] of maps) {
    box.append(make("span", { class: "layer" }, `layer ${map.layer}`));
    map.heads.forEach((found, head) => {
      const canvas = make("canvas", { width: map.thumbColumns, height: map.thumbRows });
      paintThumb(canvas, map, head);
      const button = make("button", { class: "thumb", onclick: () => open(n, head), onmousemove: (event) => tip(describe(map, head), event), onmouseleave: () => tip("") },
        canvas, make("small", {}, `${found.head} ${LETTER[found.tag]}`));
      button.setAttribute("aria-label", describe(map, head));
      button.dataset.map = n;
      button.dataset.head = head;
      button.tabIndex = n === state.map && head === state.head ? 0 : -1;
      if (data.partial && map.detail[head]) button.classList.add("whole");
      if (state.tag !== null && found.tag !== state.tag) button.classList.add("dim");
      button.onfocus = () => { state.map = n; state.head = head; say(describe(map, head)); };
      box.append(button);
    });
    for (let n = map.heads.length; n < most; n++) box.append(make("span"));
  }
  return box;
}

// a thumbnail leaves out its whole first column, and knows no scores to share anew what that had
const without = (map) => `without the first ${map.pool[1] > 1 ? `${map.pool[1]} tokens` : "token"}, other weights as they are`;

function paintThumb(canvas, map, head) {
  const context = canvas.getContext("2d"), pixels = context.createImageData(map.thumbColumns, map.thumbRows), small = thumbnail(map, head);
  const skip = $("nofirst").checked ? 1 : 0;
  for (let r = 0; r < map.thumbRows; r++) {
    const line = small.subarray(r * map.thumbColumns, (r + 1) * map.thumbColumns), top = Math.max(...line.subarray(skip)) / 255;
    for (let c = skip; c < map.thumbColumns; c++) pixels.data.set(map.top === null ? [...shade(line[c] / 255, top), line[c] ? 255 : 0] : [...colour((line[c] - 1) / 254, SIGNED), line[c] === 128 ? 0 : 255], 4 * (r * map.thumbColumns + c));
  }
  context.putImageData(pixels, 0, 0);
}

// ---- pieces of text, bars, tables

function textOf(map, head) {
  const box = make("div", { class: "text" });
  if (map && keys(map) !== queries(map)) box.append(...spans(queries(map), null, (i) => move(i, state.j), state.i), make("hr"));
  const weights = map && vectors(map, head) ? row(map, head, state.i) : null;
  const own = !map || keys(map) === queries(map);
  const choose = !map ? () => {} : own ? (i) => move(i, state.j) : (j) => move(state.i, j);
  box.append(...spans(map ? keys(map) : data.labels, weights, choose, own && map ? state.i : -1));
  if (!map && data.source) box.prepend(...spans(data.source, null, () => {}, -1), make("hr"));
  return box;
}

function spans(labels, found, choose, query) {
  const first = Math.max(0, query - 400), last = Math.min(labels.length, Math.max(query, 0) + 800), out = [];
  if (first) out.push(make("span", { class: "soft" }, `… ${first} before … `));
  for (let n = first; n < last; n++) {
    const span = make("span", { onclick: () => choose(n), title: `${n}` }, labels[n].replace(/\n/g, "⏎\n") + (data.spaced ? "" : " "));
    if (found) {
      const tint = shade(found.weights[n], found.largest), bright = tint[0] + tint[1] + tint[2] > 360;
      if (found.weights[n] > 0.004) { span.style.background = `rgb(${tint})`; span.style.color = bright ? "#000" : "#fff"; }
    }
    if (n === query) span.classList.add("query");
    if (labels === data.labels && n >= labels.length - data.written) span.classList.add("wrote");
    out.push(span);
  }
  if (last < labels.length) out.push(make("span", { class: "soft" }, ` … ${labels.length - last} more`));
  return out;
}

function barsOf(list) {
  const box = make("div", { class: "bars" }), most = Math.max(...list.map(([, share]) => share), 1e-9);
  for (const [text, share, marked] of list) {
    const bar = make("i");
    bar.style.width = `${(100 * share) / most}%`;
    box.append(make("code", {}, marked ? make("b", {}, word(text)) : word(text)), make("span", {}, share >= 0.0005 ? share.toFixed(3) : share.toExponential(1)), bar);
  }
  return box;
}

function gridOf(grid) {
  const table = make("table"), [low, high] = grid.limits, tall = !grid.texts && grid.columns.some((name) => name.length > 2);
  grid.values.forEach((line, r) => {
    const tr = make("tr", {}, make("th", {}, word(grid.rows[r])));
    line.forEach((value, c) => {
      const td = make("td", {}, grid.texts ? word(grid.texts[r][c]).slice(0, 9) : "");
      if (value !== null) {
        const tint = colour((value - low) / (high - low || 1), grid.signed ? SIGNED : CIVIDIS);
        td.style.background = `rgb(${tint})`;
        td.style.color = tint[0] + tint[1] + tint[2] > 360 ? "#000" : "#fff";
        const about = `${grid.row_axis} ${word(grid.rows[r])}, ${grid.column_axis} ${word(grid.columns[c])}: ${grid.texts ? word(grid.texts[r][c]) + " " : ""}${digits(value)} ${grid.unit}`;
        td.onmousemove = (event) => tip(about, event);
        td.onmouseleave = () => tip("");
      }
      tr.append(td);
    });
    table.append(tr);
  });
  const foot = make("tr", { class: tall ? "tall" : "" }, make("th"));
  for (const name of grid.columns) foot.append(make("th", { title: name }, word(name).slice(0, 12)));
  table.append(make("tfoot", {}, foot));
  const note = make("p", { class: "soft" }, `${grid.row_axis} ↓ ${grid.column_axis} →  ${+low.toPrecision(3)} to ${+high.toPrecision(3)} ${grid.unit}${grid.note ? "; " + grid.note : ""}`);
  return make("div", { class: "grid" }, table, note);
}

function imageOf(map, head, query) {
  const { width, height, side } = data.image, size = 280, canvas = make("canvas", { width: size, height: size });
  const context = canvas.getContext("2d"), raw = once(data.image.data, () => bytes(data.image.data)), small = new OffscreenCanvas(width, height);
  const pixels = small.getContext("2d").createImageData(width, height);
  for (let n = 0; n < width * height; n++) pixels.data.set([raw[3 * n], raw[3 * n + 1], raw[3 * n + 2], 255], 4 * n);
  small.getContext("2d").putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, size, size);
  const cell = size / side;
  if (map && vectors(map, head)) {
    const { weights } = row(map, head, query), top = weights.slice(1).reduce((a, b) => Math.max(a, b), 0) || 1;
    for (let n = 0; n < side * side; n++) {
      context.fillStyle = `rgba(${TABLE[Math.round((255 * weights[n + 1]) / top)]},0.72)`;
      context.fillRect((n % side) * cell, Math.floor(n / side) * cell, cell, cell);
    }
  }
  if (map && query > 0) {
    context.strokeStyle = "#e69f00";
    context.lineWidth = 3;
    context.strokeRect(((query - 1) % side) * cell, Math.floor((query - 1) / side) * cell, cell, cell);
  }
  canvas.id = "image";
  canvas.onclick = (event) => {
    if (!map) return;
    const box = canvas.getBoundingClientRect(), at = (n, from, whole) => clamp(Math.floor(((n - from) / whole) * side), 0, side - 1);
    move(1 + at(event.clientY, box.top, box.height) * side + at(event.clientX, box.left, box.width), state.j);
  };
  return make("div", {}, canvas, make("p", { class: "soft" }, map ? "what the chosen query reads of the image; click a patch to make it the query" : "as the model was given it"));
}

// ---- one head

const SIZE = 620;
const paper = () => Math.min(SIZE, Math.max(240, innerWidth - 60));

function drawHead() {
  const map = data.maps[state.map], found = map.heads[state.head], whole = vectors(map, state.head);
  const canvas = make("canvas", { id: "matrix", class: "map", tabIndex: 0 });
  canvas.setAttribute("aria-label", `attention map of ${title(map, state.head)}`);
  canvas.onmousemove = (event) => { const [i, j] = cellAt(canvas, event); tip(cellText(map, i, j), event); };
  canvas.onmouseleave = () => tip("");
  canvas.onclick = (event) => { const [i, j] = cellAt(canvas, event); tip(""); state.i = i; state.j = j; if (whole) state.view = "cell"; draw(); };
  canvas.onwheel = (event) => { event.preventDefault(); zoom(event.deltaY < 0 ? 0.7 : 1.4, cellAt(canvas, event)); };
  const left = make("section", {}, make("h2", {}, title(map, state.head) + (found.tag ? `: ${found.tag}` : "")), canvas, legend(map), make("p", { class: "readout", id: "readout" }));
  const right = make("section", { class: "side" });
  right.append(make("p", { class: "soft" }, describe(map, state.head).split("\n").slice(1).join(" · ")));
  if (data.image) right.append(make("h2", {}, `Query ${queries(map)[state.i]}`), imageOf(map, state.head, state.i));
  else right.append(make("h2", {}, "The text, as the chosen query reads it"), textOf(map, state.head));
  if (whole) right.append(make("h2", {}, `What “${word(queries(map)[state.i])}” (${state.i}) reads most`), barsOf(largest(map, 10)));
  else right.append(make("p", {}, "q, k and v of this head were left out of the page, so its rows cannot be computed here. " + data.leftOut));
  view.replaceChildren(make("div", { class: "columns" }, left, right));
  paintMatrix(canvas, map);
  $("readout").textContent = cellText(map, state.i, state.j);
  const box = right.querySelector(".text"), query = right.querySelector(".query");
  if (query) box.scrollTop += query.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2; // the query is in sight
}

function largest(map, count) {
  const { weights } = row(map, state.head, state.i), order = Array.from(weights.keys()).sort((a, b) => weights[b] - weights[a]).slice(0, count);
  return order.filter((j) => weights[j] > 0).map((j) => [`${keys(map)[j]}  ${j}`, weights[j], j === state.j]);
}

// which part of the map is shown: all of it, or `span` cells around the chosen one
function window_(map) {
  const most = Math.max(map.queries, map.keys), span = Math.min(state.span || most, most);
  const start = (at, size) => clamp(Math.round(at - span / 2), 0, Math.max(0, size - span));
  return { span, r: start(state.at[0], map.queries), c: start(state.at[1], map.keys), rows: Math.min(span, map.queries), columns: Math.min(span, map.keys) };
}

const margin = (shown) => (paper() / Math.max(shown.rows, shown.columns) >= 11 ? 78 : 0);

function cellAt(canvas, event) {
  const map = data.maps[state.map], shown = window_(map), box = canvas.getBoundingClientRect(), edge = margin(shown);
  const size = cellSize(shown, edge);
  return [clamp(shown.r + Math.floor((event.clientY - box.top - edge) / size[1]), 0, map.queries - 1), clamp(shown.c + Math.floor((event.clientX - box.left - edge) / size[0]), 0, map.keys - 1)];
}

function cellSize(shown, edge) {
  const side = (paper() - edge) / Math.max(shown.rows, shown.columns);
  return shown.rows > 3 * shown.columns || shown.columns > 3 * shown.rows ? [(paper() - edge) / shown.columns, (paper() - edge) / shown.rows] : [side, side];
}

function pooled(map, shown) { return !vectors(map, state.head) || Math.max(shown.rows, shown.columns) > paper(); }

function paintMatrix(canvas, map) {
  const shown = window_(map), edge = margin(shown), [wide, high] = cellSize(shown, edge), ratio = devicePixelRatio || 1;
  const width = edge + wide * shown.columns, height = edge + high * shown.rows;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d"), part = pooled(map, shown) ? thumbPart(map, shown) : exactPart(map, shown);
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.drawImage(...part, edge, edge, wide * shown.columns, high * shown.rows);
  const style = getComputedStyle(document.documentElement);
  if (edge) labels(context, map, shown, edge, wide, high, style.getPropertyValue("--ink"));
  context.strokeStyle = "#e69f00";
  context.lineWidth = 2;
  const x = edge + (state.j - shown.c) * wide, y = edge + (state.i - shown.r) * high;
  if (Math.min(wide, high) >= 4) context.strokeRect(x, y, wide, high);
  else { context.globalAlpha = 0.8; context.lineWidth = 1; context.strokeRect(x - 4, y - 4, wide + 8, high + 8); }
}

// a picture of weights, and which part of it is shown: from column and row, so many of them
function exactPart(map, shown) {
  const small = new OffscreenCanvas(shown.columns, shown.rows), context = small.getContext("2d"), pixels = context.createImageData(shown.columns, shown.rows);
  for (let r = 0; r < shown.rows; r++) {
    const found = row(map, state.head, shown.r + r);
    for (let c = 0, j = shown.c; c < shown.columns; c++, j++) pixels.data.set([...shade(found.weights[j], found.largest), found.scores[j] > -Infinity ? 255 : 0], 4 * (r * shown.columns + c));
  }
  context.putImageData(pixels, 0, 0);
  return [small, 0, 0, shown.columns, shown.rows];
}

function thumbPart(map, shown) {
  const whole = new OffscreenCanvas(map.thumbColumns, map.thumbRows);
  paintThumb(whole, map, state.head);
  const [down, across] = map.pool;
  return [whole, shown.c / across, shown.r / down, shown.columns / across, shown.rows / down];
}

function labels(context, map, shown, edge, wide, high, ink) {
  context.fillStyle = ink;
  context.font = '10px ui-monospace, "DejaVu Sans Mono", monospace';
  context.textBaseline = "middle";
  const cut = (text) => { const shownText = word(text); return shownText.length > 11 ? shownText.slice(0, 10) + "…" : shownText; };
  for (let r = 0; r < shown.rows; r++) {
    context.textAlign = "right";
    context.fillText(cut(queries(map)[shown.r + r]), edge - 4, edge + (r + 0.5) * high);
  }
  for (let c = 0; c < shown.columns; c++) {
    context.save();
    context.translate(edge + (c + 0.5) * wide, edge - 4);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(cut(keys(map)[shown.c + c]), 0, 0);
    context.restore();
  }
}

function legend(map) {
  const bar = make("canvas", { width: 128, height: 10 }), context = bar.getContext("2d");
  for (let x = 0; x < 128; x++) { context.fillStyle = `rgb(${colour(x / 127, map.top === null ? CIVIDIS : SIGNED)})`; context.fillRect(x, 0, 1, 10); }
  const shown = window_(map), small = pooled(map, shown), coarse = small && map.pool[0] * map.pool[1] > 1;
  const scale = map.top !== null ? [digits(-map.top), digits(map.top)] : { weight: ["0", "1"], root: ["0", "1, by its root"], row: ["0", "the row's largest"] }[$("scale").value];
  const note = coarse ? `; each point is the largest of ${map.pool[0]} × ${map.pool[1]} weights${vectors(map, state.head) ? ", zoom in for all (+)" : ""}` : "";
  return make("div", { class: "legend" }, scale[0], bar, scale[1] + note + (small && $("nofirst").checked ? `; ${without(map)}` : ""));
}

function cellText(map, i, j) {
  const names = `“${word(queries(map)[i])}” (${i}) reads “${word(keys(map)[j])}” (${j})`;
  if (vectors(map, state.head)) return `${names}: ${digits(row(map, state.head, i).weights[j])}`;
  const [r, c] = [Math.floor(i / map.pool[0]), Math.floor(j / map.pool[1])];
  if ($("nofirst").checked && c === 0) return `${names}: left out`;
  const byte = thumbnail(map, state.head)[r * map.thumbColumns + c], weight = map.top === null ? byte / 255 : ((byte - 128) / 127) * map.top;
  return `${names}: ${map.pool[0] * map.pool[1] > 1 ? (map.top === null ? "at most " : "of its neighbours the largest is ") : "about "}${weight.toFixed(2)}`;
}

// ---- one cell

function drawCell() {
  const map = data.maps[state.map], x = vectors(map, state.head), { i, j } = state, found = row(map, state.head, i), weight = found.weights[j];
  const q = Array.from(x.q.subarray(i * x.K, (i + 1) * x.K)), k = Array.from(x.k.subarray(j * x.K, (j + 1) * x.K)), products = q.map((a, d) => a * k[d]);
  const dot = products.reduce((a, b) => a + b, 0), added = bias(map, x, i, j), full = dot * x.scale + added;
  const may = Array.from({ length: runs(map, i).length / 2 }, (_, n) => [runs(map, i)[2 * n], runs(map, i)[2 * n + 1]]);
  const allowed = may.some(([from, to]) => from <= j && j < to) && !($("nofirst").checked && j === 0);
  const many = may.reduce((sum, [from, to]) => sum + to - from, 0);
  const mix = new Float32Array(x.U);
  for (let n = 0; n < map.keys; n++) if (found.weights[n]) for (let u = 0; u < x.U; u++) mix[u] += found.weights[n] * x.v[n * x.U + u];
  const v = Array.from(x.v.subarray(j * x.U, (j + 1) * x.U));
  const step = (name, ...body) => make("li", {}, make("h3", {}, name), ...body), number = (text) => make("p", { class: "number" }, text);
  const list = (numbers) => numbers.slice(0, 8).map(digits).join("  ") + (numbers.length > 8 ? `  … ${numbers.length} in all` : "");
  const of = { q: word(queries(map)[i]), k: word(keys(map)[j]) };
  const steps = make("ol", { class: "steps" },
    step("q · k: how well the query fits the key", number(`q of “${of.q}”  ${list(q)}\nk of “${of.k}”  ${list(k)}\nq × k  ${list(products)}`), chart(products), number(`q·k = ${digits(dot)}   (the bars are the ${x.K} products; they sum to it)`)),
    step("scale", number(`${digits(dot)} × ${digits(x.scale)} = ${digits(dot * x.scale)}` + (Math.abs(x.scale - x.K ** -0.5) < 1e-6 ? `   (1/√${x.K})` : ""))),
    ...(x.bias ? [step("bias of position", number(`${digits(dot * x.scale)} + ${digits(added)} = ${digits(full)}`))] : []),
    step("mask", number(allowed ? `“${of.q}” may read “${of.k}”; it may read ${many} of ${map.keys} positions.` : `“${of.q}” may not read “${of.k}”: its score becomes −∞ and its weight 0.`)),
    step("softmax over the row", number(allowed ? `exp(${digits(full)} − ${digits(found.top)}) / ${digits(found.total)} = ${digits(weight)}   (the row's largest score is ${digits(found.top)}; ${digits(found.total)} is the sum over all keys)` : `exp(−∞) = 0`), chart(Array.from(found.weights), j), barsOf(withChosen(map, found))),
    step("value mix: what the head hands on", number(`v of “${of.k}”  ${list(v)}\n${digits(weight)} × v  ${list(v.map((a) => a * weight))}\nsum over all keys  ${list(Array.from(mix))}`), chart(Array.from(mix)), number(`the bars are the ${x.U} numbers of the sum; this key's share of its length: ${shareOf(v, weight, mix)}`)));
  view.replaceChildren(make("h2", { id: "cell" }, `“${of.q}” (${i}) reads “${of.k}” (${j}) with weight ${digits(weight)}`), steps);
}

function withChosen(map, found) {
  const list = largest(map, 6);
  return list.some(([, , marked]) => marked) || !found.weights[state.j] ? list : [...list, [`${keys(map)[state.j]}  ${state.j}`, found.weights[state.j], true]];
}

function shareOf(v, weight, mix) {
  const squared = mix.reduce((sum, a) => sum + a * a, 0), along = v.reduce((sum, a, u) => sum + weight * a * mix[u], 0);
  return squared ? (along / squared).toFixed(3) : "0";
}

function chart(numbers, marked = -1) {
  const width = clamp(numbers.length * 9, 120, 720), height = 64, canvas = make("canvas", { width, height }), context = canvas.getContext("2d");
  const low = Math.min(0, ...numbers), high = Math.max(0, ...numbers, 1e-12), zero = (height * high) / (high - low), style = getComputedStyle(document.documentElement);
  const wide = width / numbers.length;
  numbers.forEach((value, n) => {
    context.fillStyle = n === marked ? "#e69f00" : value < 0 ? "#b35806" : style.getPropertyValue("--bar");
    const tall = (Math.abs(value) * height) / (high - low);
    context.fillRect(n * wide, value < 0 ? zero : zero - tall, Math.max(wide - 1, n === marked ? 2 : 0.6), Math.max(tall, 0.5));
  });
  return canvas;
}

// ---- going from one to another

function open(map, head) {
  Object.assign(state, { view: "head", map, head, span: null });
  tip("");
  const found = data.maps[map];
  state.i = clamp(state.i, 0, found.queries - 1);
  state.j = clamp(state.j, 0, found.keys - 1);
  state.at = [state.i, state.j];
  draw();
}

function move(i, j) {
  const map = data.maps[state.map];
  state.i = clamp(i, 0, map.queries - 1);
  state.j = clamp(j, 0, map.keys - 1);
  const shown = window_(map);
  if (state.i < shown.r || state.i >= shown.r + shown.rows || state.j < shown.c || state.j >= shown.c + shown.columns) state.at = [state.i, state.j];
  draw();
  say(cellText(map, state.i, state.j));
}

function zoom(factor, [i, j]) {
  const map = data.maps[state.map], most = Math.max(map.queries, map.keys), span = Math.round(window_(map).span * factor);
  state.span = span >= most ? null : Math.max(8, span);
  state.at = [i, j];
  draw();
}

function draw() {
  const map = data.maps[state.map], crumbs = $("crumbs"), to = (name, target) => make("button", { onclick: () => { state.view = target; draw(); } }, name);
  crumbs.replaceChildren(state.view === "all" ? make("b", {}, data.name) : to(data.name, "all"));
  if (state.view === "all") crumbs.append(make("span", { class: "soft" }, data.about));
  if (state.view !== "all") crumbs.append(make("span", {}, "›"), state.view === "head" ? make("b", {}, title(map, state.head)) : to(title(map, state.head), "head"));
  if (state.view === "cell") crumbs.append(make("span", {}, "›"), make("b", {}, `${word(queries(map)[state.i])} → ${word(keys(map)[state.j])}`));
  ({ all: drawAll, head: drawHead, cell: drawCell })[state.view]();
  $("keys").textContent = { all: "arrows: another head · Enter: open it · t: light or dark", head: "arrows: another cell (Shift: ten further) · Enter: its numbers · + − 0: zoom · [ ]: another head · Esc: all heads",
    cell: "arrows: another cell · Esc: back to the head" }[state.view];
  try { history.replaceState(null, "", state.view === "all" ? "#" : `#${state.map}.${state.head}.${state.i}.${state.j}.${state.view}`); } catch { /* a frame without an address */ }
}

function focusHead(map, head) {
  map = clamp(map, 0, data.maps.length - 1);
  head = clamp(head, 0, data.maps[map].heads.length - 1);
  const button = view.querySelector(`.thumb[data-map="${map}"][data-head="${head}"]`);
  view.querySelectorAll(".thumb").forEach((other) => { other.tabIndex = -1; });
  button.tabIndex = 0;
  button.focus();
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT" || !data.maps.length) return;
  const arrow = ARROWS[event.key], far = event.shiftKey ? 10 : 1, map = data.maps[state.map];
  if (event.key === "t") $("theme").click();
  else if (arrow && state.view === "all") focusHead(state.map + arrow[0], state.head + arrow[1]);
  else if (arrow) move(state.i + far * arrow[0], state.j + far * arrow[1]);
  else if (event.key === "Escape" && state.view !== "all") { state.view = state.view === "cell" ? "head" : "all"; draw(); if (state.view === "all") focusHead(state.map, state.head); }
  else if (event.key === "Enter" && event.target.tagName !== "BUTTON" && state.view === "head" && vectors(map, state.head)) { state.view = "cell"; draw(); }
  else if (state.view === "head" && (event.key === "+" || event.key === "=")) zoom(0.5, [state.i, state.j]);
  else if (state.view === "head" && event.key === "-") zoom(2, [state.i, state.j]);
  else if (state.view === "head" && event.key === "0") zoom(1e9, [state.i, state.j]);
  else if (state.view !== "all" && (event.key === "[" || event.key === "]")) {
    const step = event.key === "]" ? 1 : -1, next = state.head + step, inside = next >= 0 && next < map.heads.length;
    const other = clamp(state.map + (inside ? 0 : step), 0, data.maps.length - 1);
    open(other, inside ? next : step > 0 ? 0 : data.maps[other].heads.length - 1);
  } else return;
  event.preventDefault();
});

$("theme").onclick = () => {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  draw();
};
$("scale").onchange = draw;
$("nofirst").onchange = draw;
$("notes").textContent = data.notes.join(" ");
$("scale").value = "root";
state.i = data.row;
const asked = location.hash.slice(1).split(".");
if (asked.length === 5 && data.maps[asked[0]] && data.maps[asked[0]].heads[asked[1]]) {
  open(+asked[0], +asked[1]);
  move(+asked[2] || 0, +asked[3] || 0);
  if (asked[4] === "cell" && vectors(data.maps[state.map], state.head)) { state.view = "cell"; }
}
draw();
