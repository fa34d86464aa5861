// A matrix as colours, with names on both sides.
import { html, useRef, useState, useMemo, useLayoutEffect, useStudio, useWidth } from "../ui.js";
import { clamp, colour, css } from "../colours.js";
import { number, visible } from "../format.js";

export function paint(canvas, values, rows, columns, scale, hidden) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows), pixels = image.data;
  for (let n = 0; n < rows * columns; n++) {
    const [r, g, b] = colour(values[n], scale);
    pixels[4 * n] = r;
    pixels[4 * n + 1] = g;
    pixels[4 * n + 2] = b;
    pixels[4 * n + 3] = hidden && hidden(n) ? 0 : 255;
  }
  context.putImageData(image, 0, 0);
}

export function heatSvg(rows, columns, values, scale) {
  const size = 14, left = 110, top = 110;
  const plain = (text) => visible(text).replace(/[<>&"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const cells = [], count = columns.length;
  for (let r = 0; r < rows.length; r++) for (let c = 0; c < count; c++)
    cells.push(`<rect x="${left + c * size}" y="${top + r * size}" width="${size}" height="${size}" fill="${css(values[r * count + c], scale)}"/>`);
  const down = rows.map((name, r) => `<text x="${left - 5}" y="${top + r * size + 11}" text-anchor="end">${plain(name)}</text>`);
  const over = columns.map((name, c) => `<text transform="translate(${left + c * size + 10},${top - 5}) rotate(-90)">${plain(name)}</text>`);
  const width = left + count * size + 10, height = top + rows.length * size + 10;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" font-family="sans-serif" font-size="10" fill="#333">${cells.join("")}${down.join("")}${over.join("")}</svg>`;
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e9], End: [0, 1e9], PageUp: [-10, 0], PageDown: [10, 0] };

// The selected cell, the pointer and the label marks are moved by hand, so that walking over cells redraws nothing.
export function HeatMap({ values, rows, columns, scale, selected, onSelect, onOpen, label, hidden, describe, size, height, limit = 30 }) {
  const { t, say } = useStudio();
  const box = useRef(null), canvas = useRef(null), mark = useRef(null), tip = useRef(null), bands = [useRef(null), useRef(null)], names = [useRef(null), useRef(null)];
  const room = useWidth(box), [zoom, putZoom] = useState(1);
  const down = rows.length, across = columns.length;
  const longest = rows.reduce((most, name) => Math.max(most, String(name).length), 0);
  const fit = size || Math.max(2, Math.min(Math.max(limit, Math.min(44, 260 / Math.max(across, down, 1))), Math.floor(((room - 22 - Math.min(112, longest * 8 + 14)) / Math.max(across, 1)) * 2) / 2));
  const wide = Math.min(48, fit * zoom), high = height || (across > down * 3 ? Math.max(16, wide) : wide);
  useLayoutEffect(() => { paint(canvas.current, values, down, across, scale, hidden); }, [values, scale.top, scale.kind, scale.dark]);
  const text = (r, c) => (describe ? describe(r, c) : `${visible(rows[r])} → ${visible(columns[c])}\n${number(values[r * across + c])}`);
  useLayoutEffect(() => {
    const on = selected && selected[0] >= 0;
    const r = on ? clamp(selected[0], 0, down - 1) : 0, c = on ? clamp(selected[1], 0, across - 1) : 0;
    for (const one of [mark, ...bands]) one.current.hidden = !on;
    names.forEach((side, n) => side.current.querySelectorAll(".on").forEach((one) => one.classList.remove("on")));
    if (!on) return;
    Object.assign(mark.current.style, { left: c * wide + "px", top: r * high + "px", width: wide + "px", height: high + "px" });
    Object.assign(bands[0].current.style, { left: 0, top: r * high + "px", width: across * wide + "px", height: high + "px" });
    Object.assign(bands[1].current.style, { top: 0, left: c * wide + "px", height: down * high + "px", width: wide + "px" });
    [r, c].forEach((at, n) => { const one = names[n].current.querySelector(`[data-n="${at}"]`); if (one) one.classList.add("on"); });
  });
  const at = (event) => {
    const area = canvas.current.getBoundingClientRect();
    return [clamp(Math.floor((event.clientY - area.top) / high), 0, down - 1), clamp(Math.floor((event.clientX - area.left) / wide), 0, across - 1)];
  };
  const point = (event) => {
    const place = tip.current.style;
    place.left = clamp(event.clientX + 14, 0, Math.max(0, innerWidth - 220)) + "px";
    place.top = event.clientY + 18 + "px";
    tip.current.textContent = text(...at(event));
    tip.current.hidden = false;
  };
  const keys = (event) => {
    const from = selected && selected[0] >= 0 ? selected : [0, 0];
    if (event.key === "Enter" && onOpen) { event.preventDefault(); onOpen(...from); return; }
    if (!MOVES[event.key] || !onSelect) return;
    event.preventDefault();
    const next = [clamp(from[0] + MOVES[event.key][0], 0, down - 1), clamp(from[1] + MOVES[event.key][1], 0, across - 1)];
    onSelect(...next, true);
    say(text(...next));
  };
  const sides = useMemo(() => {
    const every = wide >= 10 ? 1 : Math.ceil(12 / wide), everyDown = high >= 12 ? 1 : Math.ceil(13 / high);
    return [
      html`<div class="top" ref=${names[1]} aria-hidden="true">${columns.map((name, c) => c % every === 0 && html`<span key=${c} data-n=${c} style=${{ width: wide * Math.min(every, across - c) + "px" }}>${visible(name)}</span>`)}</div>`,
      html`<div class="left" ref=${names[0]} aria-hidden="true">${rows.map((name, r) => r % everyDown === 0 && html`<span key=${r} data-n=${r} style=${{ height: high * Math.min(everyDown, down - r) + "px", lineHeight: high * everyDown + "px" }}>${visible(name)}</span>`)}</div>`,
    ];
  }, [rows, columns, wide, high]);
  return html`<div class="heatbox">
    ${across * down > 900 && html`<div class="zoom"><button class="quiet" disabled=${zoom <= 1} aria-label=${t("smaller")} onClick=${() => putZoom(zoom / 2)}>−</button><button class="quiet" disabled=${wide >= 48} aria-label=${t("larger")} onClick=${() => putZoom(zoom * 2)}>+</button></div>`}
    <div class="heat" ref=${box} tabindex="0" role="application" aria-label=${label} aria-roledescription=${t("map")} onKeyDown=${keys}>
      <div class="inner"><div class="corner"></div>${sides[0]}${sides[1]}
        <div class="field"><canvas ref=${canvas} style=${{ width: wide * across + "px", height: high * down + "px" }} onPointerMove=${point}
          onPointerLeave=${() => { tip.current.hidden = true; }} onClick=${(event) => onSelect && onSelect(...at(event), false)} onDblClick=${(event) => onOpen && onOpen(...at(event))}></canvas>
          <div class="band" ref=${bands[0]} hidden></div><div class="band" ref=${bands[1]} hidden></div><div class="mark" ref=${mark} hidden></div></div>
      </div>
    </div><div class="tip" ref=${tip} hidden></div></div>`;
}

// A small picture of a matrix. Values are bytes: 0 to 255, or around 128 if they have signs.
export function Thumbnail({ values, rows, columns, signed, kind = "weight" }) {
  const { dark } = useStudio(), canvas = useRef(null);
  useLayoutEffect(() => {
    const shades = signed ? Float32Array.from(values, (x) => x - 128) : values;
    paint(canvas.current, shades, rows, columns, signed ? { kind: "signed", top: 127, dark } : { kind, top: 255, dark });
  }, [values, dark]);
  return html`<canvas ref=${canvas} aria-hidden="true"></canvas>`;
}
