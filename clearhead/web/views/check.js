// Write a part of a Transformer; the checker says what is wrong and shows the smallest counterexample.
import { html, useState, useEffect, useRef, useStudio, useAnswer } from "../ui.js";
import { css, ink, largest } from "../colours.js";
import { number } from "../format.js";
import { Legend, Panel, Status, Switch, Tools } from "../parts/panel.js";
import { useJob } from "../parts/jobs.js";

export function Check() {
  const { t, language } = useStudio(), found = useAnswer("exercises", { lang: language });
  const [engine, putEngine] = useState("numpy"), [at, putAt] = useState("02_attention"), [work, putWork] = useState({}), [done, putDone] = useState({}), [checked, putChecked] = useState("");
  const [job, start, stop] = useJob(), heading = useRef(null);
  const list = found.answer ? found.answer.exercises.filter((one) => one.engine === engine) : [], own = list.find((one) => one.name === at) || list[0];
  const key = `${engine}/${at}`, code = work[key] ?? (own ? own.code : "");
  const run = () => { putChecked(code); start("check", { code, lang: language }); };
  const right = job && job.ended && job.result && job.result.ok;
  useEffect(() => { if (right) putDone((old) => ({ ...old, [key]: true })); }, [right]);
  if (!found.answer) return html`<${Status} state=${found} />`;
  const next = list[list.findIndex((one) => one.name === own.name) + 1];
  return html`<div class="cols wide"><${Panel} title=${t("exercises")} tools=${html`<${Switch} label=${t("engine")} value=${engine} options=${[["numpy", "NumPy"], ["torch", "PyTorch"]]} onPick=${putEngine} />`}><ol class="list tall">${list.map((one) => html`<li key=${one.name}><button data-exercise=${one.name} aria-current=${one.name === own.name} onClick=${() => putAt(one.name)}>${parseInt(one.name, 10)}. ${one.title} ${done[`${engine}/${one.name}`] && html`<span class="tick">✓</span>`}</button></li>`)}</ol></${Panel}>
  <div class="work"><${Panel} title=${own.title} headingRef=${heading} tools=${html`<div class="row"><button class="quiet" disabled=${work[key] === undefined} onClick=${() => putWork({ ...work, [key]: undefined })}>${t("start_again")}</button>${job && !job.ended ? html`<button class="do" onClick=${stop}>${t("stop")}</button>` : html`<button class="do main" data-act="check" title="Ctrl+Enter" onClick=${run}>${t("check_it")}</button>`}</div>`}>
      <${Editor} code=${code} onEdit=${(text) => putWork({ ...work, [key]: text })} onRun=${run} /></${Panel}>
    <section class="panel" data-part="verdict" aria-live="polite"><header><h2>${t("verdict")}</h2>${job && job.ended && job.result && html`<${Tools} python=${checkCode(checked, job.result)} />`}</header>${!job && html`<p class="note">${t("verdict_none")}</p>`}${job && !job.ended && html`<p class="busy" role="status">${t("loading")}</p>`}${job && job.ended && html`<${Verdict} job=${job} />`}
      ${right && next && html`<button class="do main" onClick=${() => putAt(next.name)}>${t("next_exercise", { t: next.title })}</button>`}</section></div></div>`;
}

// The learner's code, followed by the same check in Python.
const checkCode = (code, report) => [code.trimEnd(), "", "import clearhead", "", ...(report.parts || []).map((part) => `print(clearhead.check(${part.name}))`)].join("\n");

function Editor({ code, onEdit, onRun }) {
  const { t } = useStudio(), lines = useRef(null), height = { height: `${Math.min(Math.max(code.split("\n").length + 2, 14), 30) * 1.55 * 13 + 20}px` };
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); onRun(); }
    if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {  // keep the indentation
      const box = event.target, before = box.value.slice(0, box.selectionStart), indent = /(^|\n)([ ]*)[^\n]*$/.exec(before)[2] + (/:\s*$/.test(before) ? "    " : "");
      event.preventDefault();
      box.setRangeText("\n" + indent, box.selectionStart, box.selectionEnd, "end");
      onEdit(box.value);
    }
  };
  return html`<div class="editor"><div class="lines" ref=${lines} style=${height} aria-hidden="true">${Array.from({ length: code.split("\n").length }, (_, n) => n + 1).join("\n")}</div>
    <textarea class="code" style=${height} spellcheck="false" autocomplete="off" aria-label=${t("your_code")} value=${code} onInput=${(event) => onEdit(event.target.value)} onKeyDown=${keys} onScroll=${(event) => { lines.current.scrollTop = event.target.scrollTop; }}></textarea></div><p class="note">${t("editor_help")}</p>`;
}

// The verdict alone, for `nb.check` in a notebook.
export function Report() {
  const { t, language } = useStudio(), found = useAnswer("report", { lang: language });
  return html`<${Panel} title=${t("verdict")} part="verdict">${found.answer ? html`<${Verdict} job=${found.answer} />` : html`<${Status} state=${found} />`}</${Panel}>`;
}

function Verdict({ job }) {
  const { t } = useStudio(), report = job.result;
  if (!report) return html`<pre class="block error" tabindex="0">${job.output || t("state_failed")}</pre>`;
  const parts = report.parts || [], loose = [...(report.problems || []), ...(report.diagnostics || [])];
  return html`${report.syntax && html`<p class="error">${report.syntax.text || String(report.syntax)}</p>`}${loose.map((one, n) => html`<p class="error" key=${n} data-code=${one.key}>${one.text || one.message}</p>`)}
    ${!parts.length && !loose.length && !report.syntax && html`<p class="note">${t("nothing_found")}</p>`}
    ${parts.map((part) => html`<div key=${part.name}><h3>${part.name}</h3>${part.ok && html`<p class="good">✓ ${t("right")}</p>`}${part.diagnostics.map((one, n) => html`<${Diagnostic} key=${n} one=${one} />`)}</div>`)}`;
}

function Diagnostic({ one }) {
  return html`<div class="stage"><p><b data-code=${one.key}>${one.text}</b></p>${one.advice && html`<p>${one.advice}</p>`}<p class="note"><code>${one.key}</code>${one.line ? ` · ${one.line}` : ""}${one.page ? html` · <code>${one.page}</code>` : ""}</p>${one.example && html`<${Example} example=${one.example} />`}</div>`;
}

// Nested lists -> matrices with a name for each leading index: [[[[1, 2]]]] -> one matrix.
function matrices(value, at = []) {
  if (!Array.isArray(value)) return [[at, [[value]]]];
  if (!Array.isArray(value[0])) return [[at, [value]]];
  if (!Array.isArray(value[0][0])) return [[at, value]];
  return value.flatMap((inner, n) => matrices(inner, value.length > 1 ? [...at, n] : at));
}
const plain = (value) => (value === null ? NaN : value === true ? 1 : value === false ? 0 : Number(value));

function Matrix({ name, value, scale }) {
  const cell = (x) => (typeof x === "boolean" ? (x ? "✓" : "·") : typeof x === "number" ? number(x, 3) : x === null ? "NaN" : String(x));
  return matrices(value).slice(0, 4).map(([at, rows]) => html`<div class="matrix" key=${at.join()}><table><caption>${name}${at.length ? `[${at.join(", ")}]` : ""} <span class="num">${rows.length}×${rows[0].length}</span></caption><tbody>${rows.slice(0, 10).map((row, r) => html`<tr key=${r}>${row.slice(0, 10).map((x, c) => html`<td key=${c} style=${Number.isFinite(plain(x)) ? { background: css(plain(x), scale), color: ink(plain(x), scale) } : {}}>${cell(x)}</td>`)}</tr>`)}</tbody></table></div>`);
}

const flat = (value) => (Array.isArray(value) ? value.flatMap(flat) : [plain(value)]);
const minus = (a, b) => (Array.isArray(a) ? (Array.isArray(b) && a.length === b.length ? a.map((each, n) => minus(each, b[n])) : null) : plain(a) - plain(b));
const whole = (value) => value !== null && !(Array.isArray(value) && value.some((each) => !whole(each)));

// The inputs, what should come out, what came out, and the difference: one colour scale for all of them.
function Example({ example }) {
  const { t, dark } = useStudio();
  const given = Object.entries({ ...(example.inputs || {}), ...(example.weights || {}) }).filter(([, value]) => Array.isArray(value) || typeof value === "number" || typeof value === "boolean");
  const has = (value) => value !== null && value !== undefined && (Array.isArray(value) || typeof value === "number" || typeof value === "boolean");
  const outs = [["expected", example.expected], ["yours", example.got]].filter(([, value]) => has(value));
  const gap = outs.length === 2 ? minus(example.got, example.expected) : null, same = gap !== null && whole(gap);
  const top = largest([...given.flatMap(([, value]) => flat(value)), ...outs.flatMap(([, value]) => flat(value))]) || 1, scale = { kind: "signed", top, dark };
  const words = Object.entries(example).filter(([name, value]) => typeof value === "string" && value && !["expected", "got"].includes(name));
  return html`<h3>${t("counterexample")}</h3><div class="matrices">${given.map(([name, value]) => html`<${Matrix} key=${name} name=${name} value=${value} scale=${scale} />`)}</div>
    <div class="matrices" data-part="example">${outs.map(([name, value]) => html`<${Matrix} key=${name} name=${t(name)} value=${value} scale=${scale} />`)}${same && html`<${Matrix} name=${t("yours_minus")} value=${gap} scale=${scale} />`}</div>
    ${words.map(([name, value]) => html`<p class="note" key=${name}>${value}</p>`)}<${Legend} kind="signed" low=${number(-top, 3)} high=${number(top, 3)} />`;
}
