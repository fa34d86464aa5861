// The frame of everything: a panel with a title, what can be done with it, and how to read it.
import { html, useState, useStudio } from "../ui.js";
import { gradient } from "../colours.js";
import { csv, download, npz } from "../arrays.js";

export function Status({ state }) {
  const { t, tr } = useStudio();
  if (state.error) return html`<p class="error" role="alert">${state.error === "offline" ? t("offline") : tr(state.error)}</p>`;
  return state.busy && !state.answer ? html`<p class="busy" role="status">${t("loading")}</p>` : null;
}

export function Panel({ title, part, note, tools, busy, children, className = "", level = 2, headingRef }) {
  const heading = level === 2 ? html`<h2 ref=${headingRef} tabindex="-1">${title}</h2>` : html`<h3>${title}</h3>`;
  return html`<section class=${`panel ${className} ${busy ? "stale" : ""}`} data-part=${part}>
    ${(title || tools) && html`<header>${title && heading}${tools}</header>`}
    ${note && html`<p class="note">${note}</p>`}${children}
  </section>`;
}

// What the colours of a picture mean.
export function Legend({ kind, low = "0", high = "1", text }) {
  const { t, dark } = useStudio();
  return html`<p class="legend"><span class="num">${low}</span><i style=${{ background: gradient(kind, dark) }} aria-hidden="true"></i><span class="num">${high}</span><span>${text || t("legend_" + kind)}</span></p>`;
}

// Copy as Python, and save what is shown. `table` is {rows, columns, values}.
export function Tools({ python, table, name = "values", svg, children }) {
  const { t, say } = useStudio();
  const [shown, put] = useState(false);
  const copy = async () => {
    try { await navigator.clipboard.writeText(python); say(t("copied")); } catch { /* no permission: the code is shown */ }
    put(!shown);
  };
  const shape = table && [table.rows.length, table.columns.length];
  return html`<div class="tools">${children}
    ${table && html`<button class="quiet" onClick=${() => download(`${name}.csv`, csv(table.rows, table.columns, table.values), "text/csv")}>${t("save_csv")}</button>
      <button class="quiet" onClick=${() => download(`${name}.npz`, npz({ values: { shape, values: Float32Array.from(table.values) } }))}>${t("save_npz")}</button>`}
    ${svg && html`<button class="quiet" onClick=${() => download(`${name}.svg`, svg(), "image/svg+xml")}>${t("save_svg")}</button>`}
    ${python && html`<button class="quiet" data-python=${python} aria-expanded=${shown} onClick=${copy}>${t("copy")}</button>`}
    ${shown && python && html`<pre class="block" tabindex="0">${python}</pre>`}
  </div>`;
}

export function Choice({ label, value, options, onPick }) {
  return html`<label>${label} <select value=${value} onChange=${(event) => onPick(event.target.value)}>
    ${options.map(([key, text]) => html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`)}</select></label>`;
}

// Two or three buttons of which one is on.
export function Switch({ label, value, options, onPick }) {
  return html`<div class="switch" role="group" aria-label=${label}>${options.map(([key, text]) => html`<button key=${key} aria-pressed=${key === value} onClick=${() => onPick(key)}>${text}</button>`)}</div>`;
}

export function Slider({ label, value, low, high, step, shown, title, onMove }) {
  return html`<label class="slider" title=${title}><span>${label}</span><input type="range" min=${low} max=${high} step=${step} value=${value} onInput=${(event) => onMove(+event.target.value)} /><span class="num">${shown === undefined ? value : shown}</span></label>`;
}
