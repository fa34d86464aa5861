import { html, useState, useStudio, useAnswer, number, visible } from "../ui.js";
import { Bars, Status, Tools } from "../parts.js";

export function Tokens({ labels, raw, ids, selected, onSelect, generated = 0 }) {
  return html`<div class="tokens">${labels.map((label, n) => html`<button key=${n} class=${"tok" + (n >= labels.length - generated ? " new" : "")} aria-pressed=${n === selected} title=${ids && ids.length ? `#${ids[n]}${raw && raw[n] ? " " + raw[n] : ""}` : ""} onClick=${() => onSelect(n)}>${visible(label)}</button>`)}</div>`;
}

const SLIDERS = [["temperature", 0, 2, 0.05, 1], ["top_k", 0, 200, 1, 0], ["top_p", 0.05, 1, 0.05, 1], ["min_p", 0, 0.5, 0.01, 0]];

export function Write() {
  const { t, go, state, args, source, fail, setText } = useStudio();
  const [options, put] = useState({ temperature: 1, top_k: 0, top_p: 1, min_p: 0, seed: 0, count: 20 });
  const [made, putMade] = useState(null), [open, putOpen] = useState(-1), [busy, putBusy] = useState(false);
  const tokens = useAnswer("tokens", args), found = tokens.answer;
  const row = found ? (state.query >= 0 && state.query < found.labels.length ? state.query : found.labels.length - 1) : -1;
  const { temperature, top_k, top_p, min_p } = options;
  const next = useAnswer("predictions", { ...args, row, temperature, top_k, top_p, min_p }, Boolean(found && found.predicts));
  const generate = async () => {
    putBusy(true); putOpen(-1);
    try { putMade(await source.ask("generate", { ...args, ...options })); } catch (error) { fail(error); }
    putBusy(false);
  };
  const goOn = async (ids) => { try { const { text } = await source.ask("continue_with", { ...args, ids }); putMade(null); setText(text); } catch (error) { fail(error); } };
  if (!found) return html`<${Status} state=${tokens} />`;
  return html`<p class="help">${t("tokens_help")}</p><div class="cols"><div>
    <section class="panel"><h2>${t("tokens_title")} <span class="note">(${found.labels.length})</span></h2>
      ${found.source && html`<div class="tokens">${found.source.map((label, n) => html`<span key=${n} class="tok">${visible(label)}</span>`)}</div><hr />`}
      <${Tokens} labels=${found.labels} raw=${found.raw} ids=${found.ids} generated=${found.generated} selected=${row} onSelect=${(n) => go({ query: n })} />
      <${Tools} python=${found.python} /></section>
    ${source.live && found.predicts === "next token" && html`<section class="panel"><h2>${t("generated")}</h2>
      <div class="row"><label>${t("count")} <input type="number" min="1" max="256" value=${options.count} onInput=${(e) => put({ ...options, count: +e.target.value })} /></label><label>${t("seed")} <input type="number" value=${options.seed} onInput=${(e) => put({ ...options, seed: +e.target.value })} /></label>
      <button class="do main" disabled=${busy} onClick=${generate}>${t("generate")}</button></div>
      ${made && html`<p class="note">${t("alternatives")}</p><${Tokens} labels=${made.tokens.map((one) => one.text)} ids=${made.tokens.map((one) => one.id)} selected=${open} onSelect=${putOpen} />
        ${open >= 0 && made.tokens[open] && html`<${Bars} items=${made.tokens[open].alternatives.map(([text, id, probability]) => ({ text, id, probability }))} onPick=${(one) => goOn([...made.tokens.slice(0, open).map((each) => each.id), one.id])} />`}<${Tools} python=${made.python} />`}
    </section>`}</div><div>
    ${found.predicts && html`<section class="panel" data-part="predictions"><h2>${t("next_title")}</h2><p class="note">${next.answer ? next.answer.heading : ""}</p>
      <${Status} state=${next} />${next.answer && html`<${Bars} items=${next.answer.tokens} onPick=${source.live && found.predicts === "next token" ? (one) => goOn([one.id]) : null} />
      <p class="note">${t("kept", { n: next.answer.kept.toLocaleString(), m: next.answer.vocabulary.toLocaleString() })} · ${t("entropy", { x: number(next.answer.entropy, 3) })}</p><${Tools} python=${next.answer.python} />`}
      ${source.live && html`<h3>${t("sampling")}</h3>${SLIDERS.map(([name, low, high, step]) => html`<label class="slider" key=${name}><span>${t(name)}</span><input type="range" min=${low} max=${high} step=${step} value=${options[name]} onInput=${(e) => put({ ...options, [name]: +e.target.value })} /><span class="num">${options[name]}</span></label>`)}`}
      <p class="note">${t("next_help")}</p></section>`}
  </div></div>`;
}
