import { html, useState, useStudio, useAnswer } from "../ui.js";
import { Status } from "../parts.js";
import { useJob } from "./jobs.js";

export function Lab() {
  const { t, dark } = useStudio();
  const found = useAnswer("experiments", {}), [at, putAt] = useState(0), [values, put] = useState({}), [job, start, stop] = useJob();
  if (!found.answer) return html`<${Status} state=${found} />`;
  const own = found.answer.experiments[at], result = job && job.ended && job.result;
  const run = () => start("lab", { name: own.name, options: values, theme: dark ? "dark" : "light" });
  return html`<p class="help">${t("lab_help")}</p><div class="cols wide"><section class="panel"><ul class="steps" style=${{ listStyle: "none", padding: 0, margin: 0 }}>${found.answer.experiments.map((one, n) => html`<li key=${one.name}><button aria-current=${n === at} onClick=${() => { putAt(n); put({}); }}>${one.title}<small>${one.help}</small></button></li>`)}</ul></section>
  <div><section class="panel"><h2>${own.title}</h2><p class="note">${own.help}</p><h3>${t("options")}</h3>${own.options.map((option) => html`<label class="slider" key=${option.name} title=${option.help}><span>${option.name.replace(/^--/, "")}</span>${option.kind === "number" ? html`<input type="range" min=${option.low} max=${option.high} step=${option.step} value=${values[option.name] ?? option.default} onInput=${(e) => put({ ...values, [option.name]: e.target.value })} />` : html`<input value=${values[option.name] ?? option.default} onInput=${(e) => put({ ...values, [option.name]: e.target.value })} />`}<span class="num">${values[option.name] ?? option.default}</span></label>`)}
    <div class="tools">${job && !job.ended ? html`<button class="do" onClick=${stop}>${t("stop")}</button><span class="busy" role="status">${t("loading")}</span>` : html`<button class="do main" onClick=${run}>${t("run")}</button>`}</div></section>
    ${job && job.ended && !result && html`<pre class="block error" tabindex="0">${job.output}</pre>`}
    ${result && html`<section class="panel" data-part="result" aria-live="polite"><p><b>${t("claim")}</b> ${result.claim}</p><p><b>${t("found")}</b> ${result.found}</p>${job.figure && html`<img class="figure" src=${job.figure} alt=${own.title} />`}
      ${result.rows && result.rows.length > 0 && html`<div class="scroll" tabindex="0" role="group"><table class="plain"><thead><tr>${Object.keys(result.rows[0]).map((name) => html`<th key=${name}>${name}</th>`)}</tr></thead><tbody>${result.rows.map((row, n) => html`<tr key=${n}>${Object.values(row).map((x, c) => html`<td class=${typeof x === "number" ? "num" : ""} key=${c}>${typeof x === "number" ? Number(x.toPrecision(4)).toLocaleString() : x === null ? "–" : String(x)}</td>`)}</tr>`)}</tbody></table></div>`}</section>`}</div></div>`;
}
