import { html, useState, useEffect, useStudio, useAnswer, number } from "../ui.js";
import { Status } from "../parts.js";
import { useJob } from "./jobs.js";

export function Check() {
  const { t, language } = useStudio();
  const found = useAnswer("exercises", { lang: language }), [engine, putEngine] = useState("numpy"), [at, putAt] = useState(1), [code, putCode] = useState(null);
  const [job, start, stop] = useJob();
  const list = found.answer ? found.answer.exercises.filter((one) => one.engine === engine) : [];
  const own = list[at] || list[0];
  useEffect(() => { if (own && code === null) putCode(own.code); }, [own]);
  if (!found.answer) return html`<${Status} state=${found} />`;
  const pick = (n, kind = engine) => { putAt(n); putEngine(kind); putCode(found.answer.exercises.filter((one) => one.engine === kind)[n].code); };
  const keys = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start("check", { code: code || "", lang: language }); } };
  return html`<p class="help">${t("check_help")}</p><div class="cols"><section class="panel"><div class="row"><label>${t("exercise")} <select value=${at} onChange=${(e) => pick(+e.target.value)}>${list.map((one, n) => html`<option key=${one.name} value=${n}>${one.name}</option>`)}</select></label><label>${t("engine")} <select value=${engine} onChange=${(e) => pick(at, e.target.value)}><option value="numpy">NumPy</option><option value="torch">PyTorch</option></select></label>
    <span class="grow"></span>${job && !job.ended ? html`<button class="do" onClick=${stop}>${t("stop")}</button>` : html`<button class="do main" onClick=${() => start("check", { code: code || "", lang: language })}>${t("run")}</button>`}</div>
    <label style=${{ display: "block" }}><span class="live">${t("exercise")}</span><textarea class="code" spellcheck="false" aria-label=${t("check")} value=${code || ""} onInput=${(e) => putCode(e.target.value)} onKeyDown=${keys}></textarea></label></section>
  <section class="panel" data-part="verdict" aria-live="polite"><h2>${t("verdict")}</h2>${job && !job.ended && html`<p class="busy">${t("loading")}</p>`}${job && job.ended && html`<${Verdict} job=${job} />`}</section></div>`;
}

function Verdict({ job }) {
  const { t } = useStudio();
  const report = job.result;
  if (!report) return html`<pre class="block error" tabindex="0">${job.output || t("failed")}</pre>`;
  const parts = report.parts || [];
  return html`${report.syntax && html`<p class="error">${typeof report.syntax === "string" ? report.syntax : report.syntax.text || JSON.stringify(report.syntax)}</p>`}${[...(report.problems || []), ...(report.diagnostics || [])].map((one, n) => html`<p class="error" key=${n}>${one.text || one.message || JSON.stringify(one)}</p>`)}${!parts.length && !(report.problems || []).length && html`<p class="note">${t("nothing_found")}</p>`}
    ${parts.map((part) => html`<div key=${part.name}><h3>${part.name} · ${part.part}</h3>${part.diagnostics.length === 0 && html`<p class="good">✓ ${t("right")}</p>`}
      ${part.diagnostics.map((one, n) => html`<div class="stage" key=${n}><b data-code=${one.key}>${one.text}</b> <code>${one.key}</code>${one.advice && html`<p>${one.advice}</p>`}${one.example && html`<${Example} example=${one.example} />`}</div>`)}</div>`)}`;
}

function Matrix({ value }) {
  let rows = value;
  while (Array.isArray(rows) && rows.length === 1 && Array.isArray(rows[0]) && Array.isArray(rows[0][0])) rows = rows[0];
  if (!Array.isArray(rows)) return html`<code>${String(value)}</code>`;
  if (!Array.isArray(rows[0])) rows = [rows];
  if (Array.isArray(rows[0][0])) return html`<pre class="block" tabindex="0">${JSON.stringify(value)}</pre>`;
  return html`<div class="scroll" tabindex="0" role="group"><table class="plain mono"><tbody>${rows.slice(0, 12).map((row, n) => html`<tr key=${n}>${row.slice(0, 12).map((x, c) => html`<td class="num" key=${c}>${typeof x === "number" ? number(x) : String(x)}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Example({ example }) {
  const { t } = useStudio();
  const names = { inputs: t("input"), expected: t("expected"), got: t("yours") };
  return html`<div>${Object.entries(example).filter(([, value]) => value !== null && value !== "" && (typeof value !== "object" || Object.keys(value).length)).map(([name, value]) => html`<div key=${name}><span class="note">${names[name] || name}</span>${value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).map(([each, x]) => html`<div key=${each}><code>${each}</code><${Matrix} value=${x} /></div>`) : html`<${Matrix} value=${value} />`}</div>`)}</div>`;
}
