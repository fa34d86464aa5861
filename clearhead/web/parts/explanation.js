// Why a number is what it is: its terms, and for each term the cell that it came from.
import { html, useState, useEffect, useStudio, useAnswer } from "../ui.js";
import { number, visible } from "../format.js";
import { Status, Tools } from "./panel.js";
import { SignedBars } from "./bars.js";

const where = (path, index) => `${path}[${index.join(", ")}]`;
const short = (path) => path.split(".").slice(-1)[0];

export function Explanation({ path, index, onGo, hint }) {
  const { t, tr, args } = useStudio();
  const [trail, putTrail] = useState([]);
  const state = useAnswer("cell", { ...args, path, index }, Boolean(path && index));
  const found = path && index ? state.answer : null, key = found ? where(found.path, found.index) : "";
  useEffect(() => {
    if (found) putTrail((old) => { const at = old.findIndex((one) => one.key === key); return at >= 0 ? old.slice(0, at + 1) : [...old, { key, path: found.path, index: found.index }].slice(-6); });
  }, [key]);
  if (!path || !index) return html`<p class="note">${hint || t("cell_none")}</p>`;
  if (!found) return html`<${Status} state=${state} />`;
  const terms = (stage) => stage.terms.map((term) => ({
    name: tr(term.name), value: term.value, title: term.factors.map(([name, value]) => `${name} = ${number(value, 6)}`).join(" · "),
    pick: term.path && onGo ? () => onGo(term.path, term.index) : null,
  }));
  return html`<div class="why" data-cell=${`${found.path}:${found.index.join(",")}`} data-value=${found.value}>
    <h2>${t("why", { x: "" })}<span class="num answer">${number(found.value, 6)}</span></h2>
    ${trail.length > 1 && html`<p class="trail">${trail.map((one, n) => html`<button key=${one.key} class="quiet" title=${one.key} aria-current=${one.key === key} onClick=${() => onGo && onGo(one.path, one.index)}>${n ? "← " : ""}${short(one.path)}</button>`)}</p>`}
    <p class="path"><code>${key}</code>${found.labels && html` <span class="note">${found.labels.map(visible).join(" → ")}</span>`}</p>
    ${found.stages.length === 0 && html`<p class="note">${found.note || t("no_rule")}</p>`}
    ${found.stages.map((stage, n) => html`<div class="stage" key=${n}><p><b>${tr(stage.formula)}</b> <span class="num">= ${number(stage.value, 6)}</span>${stage.terms.length > 1 && html` <span class="note">${t(stage.operation === "Π" ? "multiplied" : "summed", { n: stage.terms.length })}</span>`}</p>
      <${SignedBars} items=${terms(stage)} /></div>`)}
    ${found.stages.length > 0 && html`<p class="note">${t("why_help")}</p>`}
    <${Tools} python=${found.python} />
  </div>`;
}
