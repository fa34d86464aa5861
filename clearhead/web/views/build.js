// Compose an architecture: a control for each field; its cost and shapes at once.
import { html, useState, useStudio, useAnswer } from "../ui.js";
import { big, bytes } from "../format.js";
import { Choice, Panel, Status, Tools } from "../parts/panel.js";
import { Shares } from "../parts/bars.js";
import { Chart } from "../parts/chart.js";

export function Build() {
  const { t, tr } = useStudio(), presets = useAnswer("presets", {});
  const [preset, putPreset] = useState("tiny-llama"), [changes, put] = useState({}), [past, putPast] = useState([]), [size, putSize] = useState({ length: 128, batch: 1 });
  const found = useAnswer("design", { preset, changes, ...size }), answer = found.answer;
  const [kept, keep] = useState(null);
  if (answer && answer !== kept) keep(answer);
  const shown = answer || kept;
  if (!presets.answer || !shown) return html`<${Status} state=${presets.answer ? found : presets} />`;
  const set = (path, value) => { putPast([...past, changes]); put({ ...Object.fromEntries(Object.entries(changes).filter(([key]) => !key.startsWith(path + "."))), [path]: value }); };
  const undo = () => { put(past[past.length - 1]); putPast(past.slice(0, -1)); };
  const amount = (name) => html`<label>${t(name)} <input type="number" min="1" value=${size[name]} onChange=${(event) => putSize({ ...size, [name]: Math.max(1, +event.target.value || 1) })} /></label>`;
  return html`<div class="cols wide"><${Panel} title=${t("architecture")} tools=${html`<button class="quiet" disabled=${!past.length} onClick=${undo}>${t("undo")}</button>`}>
      <div class="row" style=${{ marginBottom: "10px" }}><${Choice} label=${t("preset")} value=${preset} options=${presets.answer.presets.map((name) => [name, name])} onPick=${(name) => { putPreset(name); put({}); putPast([]); }} />${amount("length")}${amount("batch")}</div>
      <div class="tree" tabindex="0" role="group" aria-label=${t("architecture")}><${Node} node=${shown.tree} set=${set} changes=${changes} /></div></${Panel}>
  <div>${found.error && html`<p class="error" role="alert">${tr(found.error)}</p>`}<${Costs} answer=${shown} busy=${found.busy || found.error} /><${Shapes} answer=${shown} /><${Panel} title=${t("config")}><pre class="block" tabindex="0">${shown.json}</pre></${Panel}></div></div>`;
}

// One node of the config tree: its kind, its fields, its children.
function Node({ node, set, changes }) {
  const { t } = useStudio();
  return html`<fieldset><legend>${node.name || t("model")}</legend>
    ${node.kinds.length > 1 && html`<label><span>${t("kind")}</span><select data-field=${node.path} value=${node.kind} onChange=${(event) => set(node.path, node.kinds.find(([name]) => name === event.target.value)[1])}>${node.kinds.map(([name]) => html`<option key=${name} value=${name} selected=${name === node.kind}>${name || t("none")}</option>`)}</select></label>`}
    ${node.fields.map((field) => html`<label key=${field.path} title=${field.path}><span>${field.name}</span><${Control} field=${field} set=${set} /></label>`)}
    ${node.children.map((child) => html`<${Node} key=${child.path} node=${child} set=${set} changes=${changes} />`)}</fieldset>`;
}

function Control({ field, set }) {
  const { t } = useStudio(), change = (value) => set(field.path, value);
  if (field.type === "boolean") return html`<input type="checkbox" data-field=${field.path} checked=${field.value} onChange=${(event) => change(event.target.checked)} />`;
  if (field.choices) return html`<select data-field=${field.path} value=${field.value} onChange=${(event) => change(event.target.value)}>${field.choices.map((one) => html`<option key=${one} value=${one} selected=${one === field.value}>${one}</option>`)}</select>`;
  const read = (text) => (text === "" ? (field.optional ? change(null) : null) : change(+text));
  return html`<input type="number" data-field=${field.path} value=${field.value === null ? "" : field.value} placeholder=${field.optional ? t("automatic") : ""} step=${field.type === "integer" ? 1 : "any"} onChange=${(event) => read(event.target.value)} />`;
}

function Costs({ answer, busy }) {
  const { t, has, go, source, fail, info } = useStudio(), [name, putName] = useState("built"), [steps, putSteps] = useState(100);
  const { parameters, flops, memory } = answer.cost, part = (key) => (has("part_" + key) ? t("part_" + key) : key);
  const list = (table) => Object.entries(table).filter(([, value]) => value > 0).map(([key, value]) => ({ name: part(key), value }));
  const train = () => source.ask("start", { kind: "train", config: answer.json, name, steps }).then(() => go({ view: "train" }, true), fail);
  const figure = (key, value, exact) => html`<div><span class="note">${t(key)}</span><b data-value=${exact} data-cost=${key}>${value}</b></div>`;
  return html`<${Panel} title=${t("cost")} part="cost" busy=${busy} tools=${html`<${Tools} python=${answer.python} />`}>
    <div class="figures">${figure("parameters", big(parameters.total), parameters.total)}${parameters.active !== parameters.total && figure("active", big(parameters.active), parameters.active)}${figure("flops", big(flops.forward), flops.forward)}${figure("decode", big(flops.decode), flops.decode)}${figure("memory", bytes(memory.training), memory.training)}${figure("cache", bytes(memory.kv_cache), memory.kv_cache)}</div>
    <div class="pair" style=${{ marginTop: "14px" }}><div><h3>${t("parameters")}</h3><${Shares} parts=${list(parameters.by_part)} format=${big} /></div><div><h3>${t("flops")}</h3><${Shares} parts=${list(flops.by_part)} format=${big} /></div><div><h3>${t("memory")}</h3><${Shares} parts=${list({ weights: memory.weights, gradients: memory.gradients, optimizer: memory.optimizer, activations: memory.activations })} format=${bytes} /></div></div>
    ${info.train && answer.trains && html`<div class="row" style=${{ marginTop: "14px" }}><label>${t("form_name")} <input value=${name} onInput=${(event) => putName(event.target.value)} /></label><label>${t("form_steps")} <input type="number" min="1" value=${steps} onInput=${(event) => putSteps(+event.target.value)} /></label><button class="do main" data-act="train-this" onClick=${train}>${t("train_this")}</button></div>`}</${Panel}>
  <${Panel} title=${t("growth_title")} note=${Object.entries(answer.cost.complexity).filter(([, order]) => order).map(([key, order]) => `${part(key)} ${order}`).join(" · ")} part="growth" tools=${html`<${Tools} python=${answer.growth_python} />`}><${Chart} log=${true} logX=${true} x=${t("length")} y="FLOPs" curves=${answer.growth.map((curve) => ({ name: part(curve.name), points: curve.points }))} height=${210} /></${Panel}>`;
}

function Shapes({ answer }) {
  const { t, tr } = useStudio();
  return html`<${Panel} title=${t("shapes")} note=${t("shapes_help")} part="shapes" tools=${html`<${Tools} python=${answer.shapes_python} />`}><div class="scroll" tabindex="0" role="group" aria-label=${t("shapes")}><table class="plain"><thead><tr><th scope="col">${t("step_word")}</th><th scope="col">${t("formula")}</th><th scope="col" class="num">${t("shape")}</th><th scope="col" class="num">${t("parameters")}</th><th scope="col" class="num">FLOPs</th></tr></thead><tbody>${answer.steps.map((step) => html`<tr key=${step.name}><td><code>${step.name}</code></td><td>${tr(step.formula)}</td><td class="num">[${step.shape.join(", ")}]</td><td class="num">${step.parameters ? big(step.parameters) : ""}</td><td class="num">${step.flops ? big(step.flops) : ""}</td></tr>`)}</tbody></table></div></${Panel}>`;
}
