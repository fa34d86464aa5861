import { html, useState, useStudio, useAnswer, css, ink, number, percent, visible } from "../ui.js";
import { Chart, HeatMap, Legend, SignedBars, Status, Tools, csvOf } from "../parts.js";

export function Lens() {
  const { t, go, state, args } = useStudio();
  const found = useAnswer("lens", { ...args, token: state.token, top: 3 }), answer = found.answer;
  const [typed, put] = useState(state.token);
  const row = answer ? (state.query >= answer.positions[0] && state.query <= answer.positions[answer.positions.length - 1] ? state.query : answer.positions[answer.positions.length - 1]) : -1;
  const parts = useAnswer("attribution", { ...args, row, token: state.token }, Boolean(answer) && row >= 0);
  if (!answer) return html`<${Status} state=${found} />`;
  const scale = { signed: false, top: 1 }, at = answer.positions.indexOf(row), columns = answer.labels.length;
  const normTop = answer.norms.values.reduce((a, b) => Math.max(a, b), 1e-9);
  return html`<p class="help">${t("lens_help")}</p><div class="cols"><div><section class="panel"><div class="scroll" tabindex="0" role="group" aria-label=${t("lens")}><table class="lens"><thead><tr><th scope="col">${t("layer")}</th>${answer.labels.map((label, c) => html`<th scope="col" key=${c} class=${c === at ? "on" : ""}>${visible(label)}</th>`)}</tr></thead>
    <tbody>${answer.layers.map((layer, r) => html`<tr key=${layer}><th scope="row">${layer.replace("layer", t("layer")).replace("embedding", t("embedding"))}</th>${answer.top[r].map((best, c) => html`<td key=${c}><button style=${{ background: css(best[0][2], scale), color: ink(best[0][2], scale), boxShadow: c === at ? "inset 0 0 0 2px var(--mark)" : "none" }} title=${best.map(([word, id, p]) => `${visible(word)} ${percent(p)}`).join("\n")} aria-label=${`${layer}, ${visible(answer.labels[c])}: ${visible(best[0][0])} ${percent(best[0][2])}`} onClick=${() => go({ query: answer.positions[c], token: best[0][0] })}>${visible(best[0][0])}</button></td>`)}</tr>`)}</tbody></table></div>
    <${Legend} kind="probability" low="0" high="1" /><${Tools} python=${answer.python} name="lens" csv=${() => csvOf(answer.layers, answer.labels, answer.top.flatMap((line) => line.map((best) => best[0][2])), columns)} /></section>
    <section class="panel"><h2>${t("norms")}</h2><${HeatMap} values=${answer.norms.values} rows=${answer.layers} columns=${answer.labels} scale=${{ signed: false, top: normTop }} label=${t("norms")} cellHeight=${18} /><${Legend} kind="norm" low="0" high=${number(normTop, 3)} /></section></div>
  <div><section class="panel"><h2>${t("track")}</h2><form class="row" onSubmit=${(e) => { e.preventDefault(); go({ token: typed }); }}><label>${t("token")} <input value=${typed} onInput=${(e) => put(e.target.value)} /></label><button class="do">${t("apply")}</button></form>
    ${answer.token && html`<h3>${t("rank", { t: visible(answer.token[0]) })}</h3><${Chart} log=${true} x=${t("layer")} y=${t("rank", { t: "" })} curves=${[{ name: t("rank", { t: visible(answer.token[0]) }), points: answer.layers.map((_, r) => [r, answer.ranks.values[r * columns + at]]) }]} height=${180} />
      <table class="plain"><tbody>${answer.layers.map((layer, r) => html`<tr key=${layer}><th scope="row">${layer}</th><td class="num">${answer.ranks.values[r * columns + at].toLocaleString()}</td><td class="num">${percent(answer.chances.values[r * columns + at])}</td></tr>`)}</tbody></table>`}</section>
    ${parts.answer && html`<section class="panel" data-part="attribution"><h2>${t("attribution", { t: visible(parts.answer.token[0]) })}</h2><p class="note">${t("attribution_help")}</p><${SignedBars} items=${[...parts.answer.terms.map((term) => ({ name: `${term.layer.replace("layer", t("layer")).replace("embedding", t("embedding"))} ${term.part ? t(term.part) : ""}`, value: term.value })), { name: t("offset"), value: parts.answer.offset }]} /><p class="num">${t("sum")} ${number(parts.answer.sum, 6)} · logit ${number(parts.answer.logit, 6)}</p></section>`}</div></div>`;
}
