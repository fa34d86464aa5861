// The model and the text that all views share, and a second pair to compare with.
import { html, useState, useEffect, useRef, useStudio, useAnswer } from "../ui.js";
import { big } from "../format.js";
import { Choice } from "./panel.js";

const PAUSE = 120; // milliseconds after the last key until the text is read

function TextBox({ label, value, act, readonly, onChange }) {
  const [draft, put] = useState(value), typing = useRef(0), box = useRef(null);
  useEffect(() => put(value), [value]);
  useEffect(() => {
    box.current.style.height = "auto";
    box.current.style.height = Math.min(box.current.scrollHeight + 2, 150) + "px";
  }, [draft]);
  const edit = (next) => {
    put(next);
    clearTimeout(typing.current);
    typing.current = setTimeout(() => onChange(next), PAUSE);
  };
  return html`<label class="text"><span>${label}</span><textarea ref=${box} rows="1" data-act=${act} readonly=${readonly} spellcheck="false" value=${draft} onInput=${(event) => edit(event.target.value)}></textarea></label>`;
}

function Facts() {
  const { t, args } = useStudio();
  const { answer } = useAnswer("model", { model: args.model }), { answer: tokens } = useAnswer("tokens", args);
  if (!answer) return html`<p class="facts"></p>`;
  const parts = [t("fact_parameters", { n: big(answer.parameters) }), t("fact_layers", { n: answer.layers }), `d ${answer.dim}`];
  if (answer.heads) parts.push(t("fact_heads", { n: answer.heads }));
  if (answer.vocabulary) parts.push(t("fact_vocabulary", { n: answer.vocabulary.toLocaleString("en") }));
  if (tokens) parts.push(answer.context ? t("fact_tokens_of", { n: tokens.labels.length, m: answer.context.toLocaleString("en") }) : t("fact_tokens", { n: tokens.labels.length }));
  return html`<p class="facts">${parts.map((part) => html`<span key=${part}>${part}</span>`)}</p>`;
}

export function Prompt() {
  const { t, go, state, args, models, source, setText } = useStudio();
  const names = models.map((name) => [name, name]);
  const choose = (model) => go({ model, cell: "", step: "", open: false, layer: 0, head: 0, place: "", changes: "" }, true);
  const compare = () => go(state.compare ? { compare: false } : { compare: true, otherText: state.otherText || args.text });
  return html`<section class="prompt" aria-label=${t("text")}>
    <div class="line">${models.length > 1 ? html`<${Choice} label=${t("model")} value=${args.model} options=${names} onPick=${choose} />` : html`<p class="only">${args.model}</p>`}
      <${TextBox} label=${t("text")} act="text" readonly=${!source.live} value=${args.text} onChange=${setText} />
      ${source.live && html`<button class="do" data-act="compare" aria-pressed=${state.compare} onClick=${compare}>${t("compare")}</button>`}</div>
    ${state.compare && source.live && html`<div class="line second">${models.length > 1 ? html`<${Choice} label=${t("second_model")} value=${state.otherModel || args.model} options=${names} onPick=${(otherModel) => go({ otherModel })} />` : html`<p class="only">${t("second")}</p>`}
      <${TextBox} label=${t("second_text")} act="other-text" value=${state.otherText || args.text} onChange=${(otherText) => go({ otherText })} /></div>`}
    <${Facts} /></section>`;
}
