// Small parts that the views share: heat maps, bars, charts, explanations, tools.
import { html, useState, useEffect, useLayoutEffect, useRef, useMemo, useStudio, useAnswer, colour, css, gradient, share, number, percent, visible, clamp, download } from "./ui.js";

export function Status({ state }) {
  const { t } = useStudio();
  if (state.error) return html`<p class="error" role="alert">${state.error === "offline" ? t("offline") : state.error}</p>`;
  return state.busy && !state.answer ? html`<p class="busy" role="status">${t("loading")}</p>` : null;
}

export function Legend({ kind, low, high }) {
  const { t } = useStudio();
  return html`<p class="legend"><span class="num">${low}</span><i style=${{ background: gradient(kind === "signed") }} aria-hidden="true"></i><span class="num">${high}</span><span>${t("legend_" + kind)}</span></p>`;
}

// copy as Python, and save what is shown
export function Tools({ python, csv, name = "values", svg }) {
  const { t, say } = useStudio();
  const [done, put] = useState(false);
  const copy = async () => {
    try { await navigator.clipboard.writeText(python); } catch { /* no permission: the text is shown below */ }
    put(true); say(t("copied"));
  };
  return html`<div class="tools">
    ${python && html`<button class="do" data-python=${python} onClick=${copy}>${t("copy")}</button>`}
    ${csv && html`<button class="do" onClick=${() => download(`${name}.csv`, csv(), "text/csv")}>${t("save_csv")}</button>`}
    ${svg && html`<button class="do" onClick=${() => download(`${name}.svg`, svg(), "image/svg+xml")}>${t("save_svg")}</button>`}
    ${done && python && html`<pre class="block" style=${{ width: "100%" }} tabindex="0">${python}</pre>`}
  </div>`;
}

export function csvOf(rows, columns, values, width) {
  const quote = (text) => `"${String(text).replace(/"/g, '""')}"`;
  const lines = [["", ...columns].map(quote).join(",")];
  rows.forEach((name, r) => lines.push([quote(name), ...Array.from({ length: width }, (_, c) => values[r * width + c])].join(",")));
  return lines.join("\n") + "\n";
}

export function svgOf(rows, columns, values, scale) {
  const size = 14, left = 110, top = 110, escape = (text) => visible(text).replace(/[<>&"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const cells = [];
  rows.forEach((name, r) => columns.forEach((_, c) => cells.push(`<rect x="${left + c * size}" y="${top + r * size}" width="${size}" height="${size}" fill="${css(values[r * columns.length + c], scale)}"/>`)));
  const down = rows.map((name, r) => `<text x="${left - 5}" y="${top + r * size + 11}" text-anchor="end">${escape(name)}</text>`);
  const over = columns.map((name, c) => `<text transform="translate(${left + c * size + 10},${top - 5}) rotate(-90)">${escape(name)}</text>`);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${left + columns.length * size + 10}" height="${top + rows.length * size + 10}" font-family="sans-serif" font-size="10">${cells.join("")}${down.join("")}${over.join("")}</svg>`;
}

export function paint(canvas, values, rows, columns, scale, hidden) {
  canvas.width = columns; canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows), pixels = image.data;
  for (let n = 0; n < rows * columns; n++) {
    const [r, g, b] = colour(values[n], scale);
    pixels[4 * n] = r; pixels[4 * n + 1] = g; pixels[4 * n + 2] = b;
    pixels[4 * n + 3] = hidden && hidden(n) ? 0 : 255;
  }
  context.putImageData(image, 0, 0);
}

// A matrix as colours, with names on both sides; the selected cell is a frame over it, so that moving redraws nothing.
export function HeatMap({ values, rows, columns, scale, selected, onSelect, onOpen, label, hidden, describe, cellSize, cellHeight }) {
  const { t, say } = useStudio();
  const canvas = useRef(null), box = useRef(null), mark = useRef(null), tip = useRef(null);
  const count = [rows.length, columns.length];
  const wide = cellSize || clamp(Math.floor(620 / Math.max(columns.length, 1)), 4, 38), high = cellHeight || (columns.length > rows.length * 3 ? 18 : wide);
  useLayoutEffect(() => { paint(canvas.current, values, count[0], count[1], scale, hidden); }, [values, scale.top, scale.signed]);
  const text = (r, c) => describe ? describe(r, c) : `${visible(rows[r])} → ${visible(columns[c])}\n${number(values[r * count[1] + c])}`;
  const place = (element, r, c) => { Object.assign(element.style, { left: c * wide + "px", top: r * high + "px", width: wide + "px", height: high + "px" }); };
  useLayoutEffect(() => {
    if (!selected || selected[0] < 0) { mark.current.hidden = true; return; }
    mark.current.hidden = false;
    place(mark.current, clamp(selected[0], 0, count[0] - 1), clamp(selected[1], 0, count[1] - 1));
  });
  const at = (event) => {
    const area = canvas.current.getBoundingClientRect();
    return [clamp(Math.floor((event.clientY - area.top) / high), 0, count[0] - 1), clamp(Math.floor((event.clientX - area.left) / wide), 0, count[1] - 1)];
  };
  const show = (event) => {
    const [r, c] = at(event);
    Object.assign(tip.current.style, { left: clamp(event.clientX + 14, 0, innerWidth - 200) + "px", top: event.clientY + 16 + "px" });
    tip.current.textContent = text(r, c);
    tip.current.hidden = false;
  };
  const keys = (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e9], End: [0, 1e9], PageUp: [-10, 0], PageDown: [10, 0] };
    if (event.key === "Enter" && onOpen) { event.preventDefault(); onOpen(...selected); return; }
    if (!moves[event.key] || !onSelect) return;
    event.preventDefault();
    const [r, c] = selected && selected[0] >= 0 ? selected : [0, 0], [dr, dc] = moves[event.key];
    const next = [clamp(r + dr, 0, count[0] - 1), clamp(c + dc, 0, count[1] - 1)];
    onSelect(...next, true);
    say(text(...next));
  };
  const some = wide >= 9, step = some ? 1 : Math.ceil(12 / wide), stepDown = high >= 12 ? 1 : Math.ceil(14 / high);
  return html`<div class="heat" ref=${box} tabindex="0" role="application" aria-label=${label} aria-roledescription=${t("map")} onKeyDown=${keys}>
    <div class="inner">
      <div class="corner"></div>
      <div class="top" aria-hidden="true">${columns.map((name, c) => c % step === 0 && html`<span key=${c} class=${selected && selected[1] === c ? "on" : ""} style=${{ width: wide * step + "px" }}>${visible(name)}</span>`)}</div>
      <div class="left" aria-hidden="true">${rows.map((name, r) => r % stepDown === 0 && html`<span key=${r} class=${selected && selected[0] === r ? "on" : ""} style=${{ height: high * stepDown + "px", lineHeight: high * stepDown + "px" }}>${visible(name)}</span>`)}</div>
      <div class="field"><canvas ref=${canvas} style=${{ width: wide * count[1] + "px", height: high * count[0] + "px" }}
        onPointerMove=${show} onPointerLeave=${() => { tip.current.hidden = true; }} onClick=${(event) => onSelect && onSelect(...at(event), false)} onDblClick=${(event) => onOpen && onOpen(...at(event))}></canvas><div class="mark" ref=${mark} hidden></div></div>
    </div>
    <div class="tip" ref=${tip} hidden></div>
  </div>`;
}

export function Thumbnail({ values, rows, columns, signed, top }) {
  const canvas = useRef(null);
  useLayoutEffect(() => {
    const shades = signed ? Float32Array.from(values, (x) => x - 128) : values;
    paint(canvas.current, shades, rows, columns, signed ? { signed: true, top: 127 } : { signed: false, top: 255 });
  }, [values]);
  return html`<canvas ref=${canvas} aria-hidden="true"></canvas>`;
}

export function Bars({ items, onPick, most }) {
  const top = most || Math.max(...items.map((item) => item.probability), 1e-9);
  return html`<ul class="bars">${items.map((item) => html`<li key=${item.id}>
    ${onPick ? html`<button class=${item.kept === false ? "cut" : ""} onClick=${() => onPick(item)} title=${"#" + item.id}>${visible(item.text)}</button>` : html`<span class="name">${visible(item.text)}</span>`}
    <span class="track" aria-hidden="true"><i style=${{ width: (100 * item.probability) / top + "%" }}></i>${item.after !== undefined && html`<b style=${{ width: (100 * Math.min(item.after / top, 1)) + "%" }}></b>`}</span>
    <span class="num">${percent(item.after !== undefined ? item.after : item.probability)}</span></li>`)}</ul>`;
}

export function SignedBars({ items }) {
  const top = Math.max(...items.map((item) => Math.abs(item.value)), 1e-12);
  return html`<ul class="bars">${items.map((item, n) => html`<li key=${n}>
    ${item.pick ? html`<button onClick=${item.pick} title=${item.title || ""}>${item.name}</button>` : html`<span class="name" title=${item.title || ""}>${item.name}</span>`}
    <span class="track signed" aria-hidden="true"><i class=${item.value < 0 ? "minus" : "plus"} style=${{ left: (item.value < 0 ? 50 - (50 * -item.value) / top : 50) + "%", width: (50 * Math.abs(item.value)) / top + "%" }}></i></span>
    <span class="num">${number(item.value)}</span></li>`)}</ul>`;
}

// One cell's arithmetic; a term that came from another cell is a link to it.
export function Explanation({ path, index, onGo }) {
  const { t, args } = useStudio();
  const state = useAnswer("cell", { ...args, path, index }, Boolean(path && index));
  const found = state.answer;
  if (!path || !index) return html`<p class="note">${t("cell_none")}</p>`;
  if (!found) return html`<${Status} state=${state} />`;
  return html`<div data-cell=${`${found.path}:${found.index.join(",")}`} data-value=${found.value}>
    <h2>${t("why", { x: number(found.value, 6) })}</h2>
    <p class="crumbs"><code>${found.path}[${found.index.join(", ")}]</code></p>
    ${found.stages.length === 0 && html`<p class="note">${t("no_rule")}</p>`}
    ${found.stages.map((stage, n) => html`<div class="stage" key=${n}><b>${stage.formula}</b> <span class="num">= ${number(stage.value, 6)}</span>
      <${SignedBars} items=${stage.terms.map((term) => ({ name: term.name, value: term.value, title: term.factors.map(([name, value]) => `${name} = ${number(value, 6)}`).join(", "), pick: term.path && onGo ? () => onGo(term.path, term.index) : null }))} /></div>`)}
    <${Tools} python=${found.python} />
  </div>`;
}

const LINES = ["#0b62a3", "#b4470a", "#1d7a4a", "#8a3f86", "#7a6a00", "#3b3b98"], DARK_LINES = ["#7cc0f4", "#ffa45c", "#6fd39b", "#e7a3e2", "#e8da5e", "#b3b5ff"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 3", "12 4"];

// Curves: [{name, points: [[x, y], …]}]
export function Chart({ curves, x, y, log, height = 240, label }) {
  const { dark } = useStudio();
  const width = 640, left = 56, bottom = 34, top = 10, right = 12;
  const shown = curves.map((curve) => ({ ...curve, points: curve.points.filter(([, b]) => Number.isFinite(b) && (!log || b > 0)) })).filter((curve) => curve.points.length);
  if (!shown.length) return null;
  const f = log ? Math.log10 : (v) => v, xs = shown.flatMap((c) => c.points.map((p) => p[0])), ys = shown.flatMap((c) => c.points.map((p) => f(p[1])));
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const px = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - right), py = (v) => height - bottom - ((f(v) - y0) / (y1 - y0 || 1)) * (height - bottom - top);
  const ticks = [0, 0.25, 0.5, 0.75, 1];
  return html`<figure style=${{ margin: 0 }}><svg class="chart" viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${label || `${y} / ${x}`}>
    ${ticks.map((part) => { const v = y0 + part * (y1 - y0), at = height - bottom - part * (height - bottom - top); return html`<g key=${part}><line class="grid" x1=${left} x2=${width - right} y1=${at} y2=${at} /><text x=${left - 6} y=${at + 4} text-anchor="end">${number(log ? 10 ** v : v, 3)}</text></g>`; })}
    ${[0, 0.5, 1].map((part) => html`<text key=${part} x=${px(x0 + part * (x1 - x0))} y=${height - 16} text-anchor=${part === 0 ? "start" : part === 1 ? "end" : "middle"}>${number(Math.round((x0 + part * (x1 - x0)) * 100) / 100, 4)}</text>`)}
    <text x=${(left + width) / 2} y=${height - 2} text-anchor="middle">${x}</text>
    ${shown.map((curve, n) => html`<path key=${curve.name} d=${curve.points.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join("")} fill="none" stroke=${(dark ? DARK_LINES : LINES)[n % 6]} stroke-dasharray=${DASHES[n % 6]} stroke-width="2" />`)}
  </svg><figcaption class="legend">${shown.map((curve, n) => html`<span key=${curve.name} class="row"><svg width="26" height="8" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" stroke=${(dark ? DARK_LINES : LINES)[n % 6]} stroke-dasharray=${DASHES[n % 6]} stroke-width="2" /></svg>${curve.name}</span>`)}</figcaption></figure>`;
}

export const tagWord = (t, tag) => t("tag_" + (tag ? tag.replace(/[ -]/g, "_") : "none"));
