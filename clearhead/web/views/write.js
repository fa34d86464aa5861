import { html, useState, useStudio, useAnswer } from "../ui.js";
import { number, visible } from "../format.js";
import { Legend, Panel, Slider, Status, Tools } from "../parts/panel.js";
import { Bars } from "../parts/bars.js";
import { Chart } from "../parts/chart.js";
import { Tokens } from "../parts/tokens.js";
import { Versus, merge } from "../parts/versus.js";
import { Chat } from "./chat.js";

const SLIDERS = [["temperature", 0, 2, 0.05], ["top_k", 0, 100, 1], ["top_p", 0.05, 1, 0.05], ["min_p", 0, 0.5, 0.01]];
const NEUTRAL = { temperature: 1, top_k: 0, top_p: 1, min_p: 0 };

const about = (t, answer) => t("next_after_" + answer.predicts.replace(" ", "_"), { t: visible(answer.label) });

export function Write() {
  const { t, go, state, args, other, source, fail, setText } = useStudio();
  const [options, put] = useState(NEUTRAL);
  const tokens = useAnswer("tokens", args), found = tokens.answer;
  const row = found ? (state.query >= 0 && state.query < found.labels.length ? state.query : found.labels.length - 1) : -1;
  const ready = Boolean(found && tokens.fresh && found.predicts);
  const next = useAnswer("predictions", { ...args, row, ...(source.live ? options : {}) }, ready);
  const goOn = async (ids) => {
    try { setText((await source.ask("continue_with", { ...args, ids, row })).text); } catch (error) { fail(error); }
  };
  if (!found) return html`<${Status} state=${tokens} />`;
  const writes = source.live && found.predicts === "next token";
  return html`<div class="cols"><div>
      <${Panel} title=${html`${t("tokens_title")} <span class="note">${found.labels.length}</span>`} note=${t("tokens_help")} busy=${tokens.busy} part="tokens"
        tools=${html`<${Tools} python=${found.python} />`}>
        ${found.source && html`<h3>${t("place_encoder")}</h3><${Tokens} labels=${found.source} onSelect=${() => {}} label=${t("place_encoder")} /><h3>${t("place_decoder")}</h3>`}
        <${Tokens} labels=${found.labels} raw=${found.raw} ids=${found.ids} chances=${found.chances} generated=${found.generated} selected=${row} onSelect=${(n) => go({ query: n })} />
        ${found.chances.length > 0 && html`<${Legend} kind="probability" text=${t("legend_chance")} />`}
      </${Panel}>
      ${found.chances.length > 1 && html`<${Surprise} tokens=${found} row=${row} />`}
      ${writes && html`<${Generate} options=${options} goOn=${goOn} />`}
      ${writes && found.chat && html`<${Chat} options=${options} />`}
    </div><div>
      ${found.predicts && html`<${Panel} title=${t("next_title")} note=${next.answer ? about(t, next.answer) : ""} part="predictions" busy=${next.busy}
          tools=${next.answer && html`<${Tools} python=${next.answer.python} name="predictions" table=${{ rows: next.answer.tokens.map((one) => one.text), columns: ["probability", "after"], values: next.answer.tokens.flatMap((one) => [one.probability, one.after]) }} />`}>
        ${source.live && html`<div class="sliders">${SLIDERS.map(([name, low, high, step]) => html`<${Slider} key=${name} label=${t(name)} low=${low} high=${high} step=${step} value=${options[name]} title=${t("about_" + name)} onMove=${(value) => put({ ...options, [name]: value })} />`)}</div>`}
        <${Status} state=${next} />
        ${next.answer && html`<${Funnel} answer=${next.answer} /><${Bars} items=${next.answer.tokens} onPick=${writes ? (one) => goOn([one.id]) : null} />`}
        <p class="note">${t(writes ? "next_help" : "bars_help")}</p>
      </${Panel}>`}
      ${other && found.predicts && html`<${Second} first=${next.answer} row=${row} />`}
    </div></div>`;
}

// Bits of surprise at each token: −log2 of its probability.
function Surprise({ tokens, row }) {
  const { t, go } = useStudio(), bits = tokens.chances.map((p) => (p >= 0 ? -Math.log2(Math.max(p, 1e-12)) : NaN)), known = bits.slice(1);
  const mean = known.reduce((sum, each) => sum + each, 0) / known.length, rare = known.indexOf(Math.max(...known)) + 1;
  return html`<${Panel} title=${t("surprise")} part="surprise" note=${t("surprise_help", { x: number(2 ** mean, 3), t: visible(tokens.labels[rare]), b: number(bits[rare], 3) })}
    tools=${html`<${Tools} python=${tokens.surprise_python} name="surprise" table=${{ rows: tokens.labels, columns: ["bits"], values: bits }} />`}><${Chart} x=${t("position")} y=${t("bits")} zero=${true} height=${170} curves=${[{ name: t("bits"), points: bits.map((each, n) => [n, each]) }]} at=${row} onPick=${(n) => go({ query: n })} name="surprise" /></${Panel}>`;
}

// How many tokens each filter leaves.
function Funnel({ answer }) {
  const { t } = useStudio();
  return html`<p class="funnel"><b class="num">${answer.vocabulary.toLocaleString("en")}</b> ${t("tokens_unit")}${answer.stages.map(([name, left]) => html`<span key=${name}>→ ${t(name)} <b class="num">${left.toLocaleString("en")}</b></span>`)}<span class="grow"></span>${t("entropy", { x: number(answer.entropy, 3) })}</p>`;
}

function Generate({ options, goOn }) {
  const { t, args, source, fail } = useStudio();
  const [size, putSize] = useState({ count: 24, seed: 0 }), [made, putMade] = useState(null), [open, putOpen] = useState(-1), [busy, putBusy] = useState(false);
  const generate = async () => {
    putBusy(true);
    putOpen(-1);
    try { putMade({ for: args.text, ...(await source.ask("generate", { ...args, ...options, ...size })) }); } catch (error) { fail(error); }
    putBusy(false);
  };
  const number = (name, low, high) => html`<label>${t(name)} <input type="number" min=${low} max=${high} value=${size[name]} onInput=${(event) => putSize({ ...size, [name]: +event.target.value })} /></label>`;
  const shown = made && made.for === args.text ? made : null, at = shown && shown.tokens[open];
  return html`<${Panel} title=${t("generated")} part="generated" tools=${shown && html`<${Tools} python=${shown.python} />`} note=${t("generated_help")}>
    <div class="row">${number("count", 1, 256)}${number("seed", 0, 1e9)}<button class="do main" data-act="generate" disabled=${busy} onClick=${generate}>${busy ? t("loading") : t("generate")}</button>
      ${shown && html`<button class="do" onClick=${() => goOn(shown.tokens.map((one) => one.id))}>${t("keep_text")}</button>`}</div>
    ${shown && html`<p class="note">${t("alternatives")}</p><${Tokens} labels=${shown.tokens.map((one) => one.text)} ids=${shown.tokens.map((one) => one.id)} chances=${shown.tokens.map((one) => one.probability)} selected=${open} onSelect=${putOpen} label=${t("generated")} />
      ${at && html`<h3>${t("instead", { t: at.text })}</h3><${Bars} items=${at.alternatives.map(([text, id, probability]) => ({ text, id, probability }))} onPick=${(one) => goOn([...shown.tokens.slice(0, open).map((each) => each.id), one.id])} />`}`}
  </${Panel}>`;
}

// The same position of the second model or text.
function Second({ first, row }) {
  const { t, other, args } = useStudio();
  const tokens = useAnswer("tokens", other), predicts = Boolean(tokens.fresh && tokens.answer && tokens.answer.predicts);
  const found = useAnswer("predictions", { ...other, row: predicts && other.text === args.text && row < tokens.answer.labels.length ? row : -1 }, predicts);
  if (!found.answer || !first) return html`<${Status} state=${found} />`;
  return html`<${Panel} title=${t("compare_next")} part="versus" note=${`${about(t, first)} / ${about(t, found.answer)}`} tools=${html`<${Tools} python=${`${first.python}\n\n${found.answer.python}`} />`}><${Versus} items=${merge(first.tokens, found.answer.tokens)} names=${[t("first"), t("second")]} /></${Panel}>`;
}
