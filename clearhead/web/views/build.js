import { html, useState, useEffect, useStudio, useAnswer } from "../ui.js";
import { Status } from "../parts.js";

const big = (n) => (n >= 1e12 ? (n / 1e12).toFixed(2) + "T" : n >= 1e9 ? (n / 1e9).toFixed(2) + "B" : n >= 1e6 ? (n / 1e6).toFixed(2) + "M" : n >= 1e3 ? (n / 1e3).toFixed(1) + "k" : String(n));
const bytes = (n) => (n >= 1e9 ? (n / 1e9).toFixed(2) + " GB" : n >= 1e6 ? (n / 1e6).toFixed(1) + " MB" : (n / 1e3).toFixed(1) + " kB");

export function Build() {
  const { t, go, source, fail, info } = useStudio();
  const [name, putName] = useState("built");
  const [preset, putPreset] = useState("tiny-llama"), [changes, put] = useState({}), [length, putLength] = useState(128);
  const names = useAnswer("presets", {}), found = useAnswer("design", { preset, changes, length }), answer = found.answer;
  if (!names.answer) return html`<${Status} state=${names} />`;
  const control = (field) => {
    const value = changes[field.path] ?? field.value, set = (next) => put({ ...changes, [field.path]: next });
    if (field.type === "boolean") return html`<input type="checkbox" checked=${value} onChange=${(e) => set(e.target.checked)} />`;
    if (field.choices) return html`<select value=${value} onChange=${(e) => set(e.target.value)}>${field.choices.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>`;
    return html`<input type="number" value=${value} step=${field.type === "integer" ? 1 : "any"} onChange=${(e) => e.target.value !== "" && set(+e.target.value)} />`;
  };
  return html`<p class="help">${t("build_help")}</p><div class="cols wide"><section class="panel"><div class="row"><label>${t("preset")} <select value=${preset} onChange=${(e) => { putPreset(e.target.value); put({}); }}>${names.answer.presets.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label><label>${t("length")} <input type="number" min="1" value=${length} onChange=${(e) => putLength(+e.target.value || 1)} /></label><button class="do" disabled=${!Object.keys(changes).length} onClick=${() => put({})}>${t("undo")}</button></div>
    ${answer && html`<div class="steps fields">${answer.fields.map((field) => html`<label class="slider" key=${field.path}><code>${field.path}</code>${control(field)}</label>`)}</div>`}</section>
  <div>${found.error && html`<p class="error" role="alert">${found.error}</p>`}${answer && html`<section class="panel" data-part="cost"><table class="plain"><tbody><tr><th scope="row">${t("parameters")}</th><td class="num" data-value=${answer.parameters}>${big(answer.parameters)}</td></tr><tr><th scope="row">${t("flops")}</th><td class="num">${big(answer.flops)}</td></tr><tr><th scope="row">${t("memory")}</th><td class="num">${bytes(answer.memory)}</td></tr><tr><th scope="row">${t("cache")}</th><td class="num">${bytes(answer.cache)}</td></tr></tbody></table>
    <div class="tools">${info.runs && html`<label>${t("name")} <input value=${name} onInput=${(e) => putName(e.target.value)} /></label><button class="do main" onClick=${() => source.ask("start", { kind: "train", config: answer.json, name, steps: 100 }).then(() => go({ view: "train" }, true), fail)}>${t("train_this")}</button>`}<button class="do" data-python=${answer.python} onClick=${() => navigator.clipboard && navigator.clipboard.writeText(answer.python)}>${t("copy")}</button></div></section>
    <section class="panel"><h2>${t("shapes")}</h2><div class="scroll steps" tabindex="0" role="group"><table class="plain"><tbody>${answer.steps.map((step) => html`<tr key=${step.name}><td><code>${step.name}</code></td><td>${step.formula}</td><td class="num">[${step.shape.join(", ")}]</td></tr>`)}</tbody></table></div></section><section class="panel"><h2>${t("config")}</h2><pre class="block" tabindex="0">${answer.json}</pre></section>`}</div></div>`;
}
