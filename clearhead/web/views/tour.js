// Ten steps through the Transformer on the reader's own sentence. Each opens the view and the cell with the real numbers.
import { html, useEffect, useStudio, useAnswer } from "../ui.js";
import { number, visible } from "../format.js";

const LAST = 10;
const STOPS = [
  { view: "write" },
  { view: "flow", step: /^(embedding|source)\.tokens$|^embedding\.patches$/, cell: (last) => [last, 0] },
  { view: "flow", step: /mixer\.query$/, cell: (last, head) => [head, last, 0] },
  { view: "flow", step: /mixer\.scores$/, cell: (last, head, key) => [head, last, key] },
  { view: "flow", step: /mixer\.weights$/, cell: (last, head) => [head, Math.max(0, last - 1), last] },
  { view: "flow", step: /mixer\.weights$/, cell: (last, head, key) => [head, last, key] },
  { view: "flow", step: /mixer\.mixed$/, cell: (last, head) => [head, last, 0] },
  { view: "flow", step: /mixer\.out$/, cell: (last) => [last, 0] },
  { view: "flow", step: /mixer_residual$/, cell: (last) => [last, 0] },
  { view: "flow", step: /^head\./, cell: null },
];

export function Tour() {
  const { t, state } = useStudio();
  return state.tour ? html`<${Steps} n=${Math.min(state.tour, LAST)} t=${t} />` : null;
}

function Steps({ n }) {
  const { t, go, args, state } = useStudio();
  const steps = useAnswer("flow", args).answer, { answer: tokens, fresh } = useAnswer("tokens", args);
  const next = useAnswer("predictions", { ...args, row: tokens ? tokens.labels.length - 1 : -1 }, Boolean(fresh && tokens.predicts)).answer;
  const last = tokens ? tokens.labels.length - 1 : 0, key = Math.max(0, last - 1), best = next && next.tokens[0];
  const place = (m) => {
    const stop = STOPS[m - 1], step = stop.step && steps && steps.steps.find((one) => stop.step.test(one.name));
    const cell = m === LAST && best ? [last, best.id] : stop.cell && step ? stop.cell(last, 0, key) : null;
    return { view: stop.view, head: 0, ...(step ? { step: step.name, cell: cell ? cell.join(",") : "" } : {}), ...(m === 1 ? { query: -1 } : {}) };
  };
  const move = (m) => go({ tour: m, ...place(m) }, true);
  useEffect(() => { if (steps && tokens && n > 1 && !state.step) go(place(n)); }, [steps, tokens, next]);
  const wanted = steps && tokens ? place(n) : {}, cell = useAnswer("cell", { ...args, path: wanted.step, index: wanted.cell ? wanted.cell.split(",").map(Number) : null }, Boolean(wanted.cell && fresh)).answer;
  const words = tokens ? { a: visible(tokens.labels[last]), b: visible(tokens.labels[key]), n: tokens.labels.length, x: cell ? number(cell.value, 4) : "…", t: best ? visible(best.text) : "…", c: wanted.step || "" } : null;
  return html`<aside class="tour" aria-label=${t("tour")}><div><p class="note">${t("tour_of", { n })}</p><h2>${t(`tour${n}_title`)}</h2><p>${t("tour" + n)}</p>${words && html`<p class="real" data-real=${n}>${t(`tour${n}_real`, words)}</p>`}</div>
    <div><ul class="dots" aria-hidden="true">${Array.from({ length: LAST }, (_, m) => html`<li key=${m}><i class=${m < n ? "on" : ""}></i></li>`)}</ul>
    <div class="row tight" style=${{ marginTop: "8px" }}><button class="do" disabled=${n === 1} onClick=${() => move(n - 1)}>${t("tour_back")}</button><button class="do main" disabled=${n === LAST} onClick=${() => move(n + 1)}>${t("tour_next")}</button><button class="do" onClick=${() => move(n)}>${t("tour_show")}</button><button class="do" onClick=${() => go({ tour: 0 }, true)}>${t("tour_close")}</button></div></div></aside>`;
}
