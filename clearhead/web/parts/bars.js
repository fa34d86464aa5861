// Lists of numbers as bars.
import { html, useStudio } from "../ui.js";
import { largest } from "../colours.js";
import { number, percent, visible } from "../format.js";

// Probabilities. `after` is what the filters leave; a token that they cut is crossed out.
export function Bars({ items, onPick, most }) {
  const { t } = useStudio();
  const top = most || Math.max(...items.map((item) => Math.max(item.probability, item.after || 0)), 1e-9);
  const width = (value) => ({ width: (100 * Math.min(value / top, 1)).toFixed(2) + "%" });
  return html`<ul class="bars">${items.map((item) => html`<li key=${item.id} class=${item.kept === false ? "cut" : ""}>
    ${onPick ? html`<button onClick=${() => onPick(item)} title=${t("go_on", { t: visible(item.text) })}>${visible(item.text)}</button>` : html`<span class="name">${visible(item.text)}</span>`}
    <span class="track" aria-hidden="true"><i style=${width(item.probability)}></i>${item.after !== undefined && html`<b style=${width(item.after)}></b>`}</span>
    <span class="num" data-id=${item.id} data-value=${item.after !== undefined ? item.after : item.probability}>${item.kept === false ? t("cut") : percent(item.after !== undefined ? item.after : item.probability)}</span></li>`)}</ul>`;
}

// Numbers with signs: to the left or to the right of the middle.
export function SignedBars({ items, digits = 4, most }) {
  const top = most || largest(items.map((item) => item.value)) || 1;
  return html`<ul class="bars">${items.map((item, n) => html`<li key=${n}>
    ${item.pick ? html`<button onClick=${item.pick} title=${item.title || ""}>${item.name}</button>` : html`<span class="name" title=${item.title || ""}>${item.name}</span>`}
    <span class="track signed" aria-hidden="true"><i class=${item.value < 0 ? "minus" : "plus"} style=${{ left: (item.value < 0 ? 50 + (50 * item.value) / top : 50) + "%", width: (50 * Math.abs(item.value)) / top + "%" }}></i></span>
    <span class="num">${number(item.value, digits)}</span></li>`)}</ul>`;
}

// Shares of a whole: one bar cut into parts, and a list.
export function Shares({ parts, format }) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  return html`<div class="shares"><div class="whole" aria-hidden="true">${parts.map((part, n) => html`<i key=${part.name} class=${"share" + (n % 6)} style=${{ width: (100 * part.value) / total + "%" }}></i>`)}</div>
    <ul>${parts.map((part, n) => html`<li key=${part.name}><i class=${"share" + (n % 6)} aria-hidden="true"></i><span>${part.name}</span><span class="num">${format(part.value)}</span><span class="num soft">${percent(part.value / total)}</span></li>`)}</ul></div>`;
}
