// Instruments that answer while a slider moves, and the experiments of `clearhead lab`.
import { html, useState, useMemo, useStudio, useAnswer } from "../ui.js";
import { largest } from "../colours.js";
import { number } from "../format.js";
import { Choice, Legend, Panel, Slider, Status, Tools } from "../parts/panel.js";
import { Chart } from "../parts/chart.js";
import { HeatMap, heatSvg } from "../parts/heatmap.js";
import { useJob } from "../parts/jobs.js";

export function Lab() {
  const { t, has } = useStudio(), [at, putAt] = useState("positions");
  const found = useAnswer("experiments", {}), tools = useAnswer("instruments", {});
  if (!found.answer || !tools.answer) return html`<${Status} state=${found.error ? found : tools} />`;
  const instrument = tools.answer.instruments.find((one) => one.name === at), own = found.answer.experiments.find((one) => one.name === at);
  const entry = (one) => html`<li key=${one.name}><button data-lab=${one.name} aria-current=${one.name === at} onClick=${() => putAt(one.name)}>${t("lab_" + one.name)}<small>${has(`lab_${one.name}_help`) ? t(`lab_${one.name}_help`) : one.help}</small></button></li>`;
  return html`<div class="cols wide"><div><${Panel} title=${t("instruments")} note=${t("instruments_help")}><ul class="list">${tools.answer.instruments.map(entry)}</ul></${Panel}>
      <${Panel} title=${t("experiments")} note=${t("experiments_help")}><ul class="list">${found.answer.experiments.map(entry)}</ul></${Panel}></div>
    <div>${instrument ? html`<${Instrument} key=${at} own=${instrument} />` : html`<${Experiment} key=${at} own=${own} />`}</div></div>`;
}

const word = ({ t, has }, text) => (has("lab_word_" + text) ? t("lab_word_" + text) : text);

// Sliders that grow by factors have the exponent as their position.
function Control({ control, value, onMove }) {
  const studio = useStudio(), label = word(studio, control.name);
  if (control.choices) return html`<${Choice} label=${label} value=${String(value)} options=${control.choices.map((one) => [one, word(studio, one)])} onPick=${onMove} />`;
  if (control.factor) return html`<${Slider} label=${label} low=${Math.log(control.low)} high=${Math.log(control.high)} step=${Math.log(control.factor)} value=${Math.log(value)} shown=${number(value, 3)} onMove=${(x) => onMove(control.whole ? Math.round(Math.exp(x)) : Math.exp(x))} />`;
  return html`<${Slider} label=${label} low=${control.low} high=${control.high} step=${control.step} value=${value} onMove=${onMove} />`;
}

function Instrument({ own }) {
  const studio = useStudio(), { t, dark } = studio, [values, put] = useState(() => Object.fromEntries(own.controls.map((one) => [one.name, one.default])));
  const found = useAnswer("instrument", { name: own.name, values }), answer = found.answer;
  const map = (one, n) => {
    const scale = { kind: one.kind, top: one.top || largest(one.values.values) || 1, dark };
    return html`<${Panel} key=${n} part="map" title=${word(studio, one.title)} busy=${found.busy} tools=${html`<${Tools} python=${one.python} name=${own.name} table=${{ rows: one.rows, columns: one.columns, values: one.values.values }} svg=${one.values.values.length < 20000 ? () => heatSvg(one.rows, one.columns, one.values.values, scale) : null} />`}>
      <${HeatMap} values=${one.values.values} rows=${one.rows} columns=${one.columns} scale=${scale} label=${one.title} limit=${14} height=${one.height} /><${Legend} kind=${one.kind} low=${one.kind === "signed" ? number(-scale.top, 3) : "0"} high=${number(scale.top, 3)} text=${word(studio, one.unit)} /></${Panel}>`;
  };
  return html`<${Panel} title=${t("lab_" + own.name)} note=${t(`lab_${own.name}_help`)} part="instrument" tools=${answer && answer.python && html`<${Tools} python=${answer.python} />`}><div class="sliders">${own.controls.filter((control) => !control.only || control.only.includes(values[own.controls[0].name])).map((control) => html`<${Control} key=${control.name} control=${control} value=${values[control.name]} onMove=${(value) => put({ ...values, [control.name]: value })} />`)}</div>
    <${Status} state=${found} />${answer && answer.facts.length > 0 && html`<div class="figures" style=${{ marginTop: "12px" }}>${answer.facts.map(([name, value]) => html`<div key=${name}><span class="note">${word(studio, name)}</span><b data-fact=${name}>${value}</b></div>`)}</div>`}
    ${answer && answer.formula && html`<p style=${{ marginTop: "10px" }}><code>${answer.formula}</code></p>`}</${Panel}>
    ${answer && answer.charts.map((one, n) => html`<${Panel} key=${"c" + n} part="chart" title=${word(studio, one.title)} busy=${found.busy} tools=${html`<${Tools} python=${one.python} name=${own.name} table=${curveTable(one.curves)} />`}><${Chart} x=${word(studio, one.x)} y=${word(studio, one.y)} log=${one.log} logX=${one.logX} zero=${one.zero} curves=${one.curves.map((curve) => ({ name: word(studio, curve.name), points: curve.points }))} name=${own.name} /></${Panel}>`)}
    ${answer && answer.maps.map(map)}`;
}

// Curves as one table: a row for each x, a column for each curve.
function curveTable(curves) {
  const rows = [...new Set(curves.flatMap((curve) => curve.points.map(([x]) => x)))].sort((a, b) => a - b);
  const known = curves.map((curve) => new Map(curve.points));
  return { rows, columns: curves.map((curve) => curve.name), values: rows.flatMap((x) => known.map((curve) => curve.get(x) ?? NaN)) };
}

function Experiment({ own }) {
  const { t, tr, has, dark } = useStudio(), [values, put] = useState({}), [job, start, stop] = useJob();
  const result = job && job.ended && job.result, running = job && !job.ended;
  const run = () => start("lab", { name: own.name, options: values, theme: dark ? "dark" : "light" });
  const set = (name, value) => put({ ...values, [name]: value });
  const option = (one) => { const value = values[one.name] ?? one.default, label = one.name.replace(/^--/, "");
    return one.kind === "number" ? html`<${Slider} key=${one.name} label=${label} title=${tr(one.help)} low=${one.low} high=${one.high} step=${one.step} value=${value} onMove=${(x) => set(one.name, x)} />`
      : html`<label class="slider" key=${one.name} title=${tr(one.help)}><span>${label}</span><input value=${value} onInput=${(event) => set(one.name, event.target.value)} /><span></span></label>`; };
  const command = useMemo(() => ["clearhead lab", own.name, ...Object.entries(values).map(([name, value]) => `${name} ${value}`)].join(" "), [own, values]);
  return html`<${Panel} title=${t("lab_" + own.name)} note=${has(`lab_${own.name}_help`) ? t(`lab_${own.name}_help`) : own.help} part="experiment"><div class="sliders">${own.options.map(option)}</div>
    <div class="row" style=${{ marginTop: "10px" }}>${running ? html`<button class="do" onClick=${stop}>${t("stop")}</button><span class="busy" role="status">${job.output.trim().split("\n").pop() || t("loading")}</span>` : html`<button class="do main" data-act="run" onClick=${run}>${t("run")}</button>`}<span class="grow"></span><code>${command}</code></div></${Panel}>
    ${job && job.ended && !result && html`<pre class="block error" tabindex="0">${job.output || t("state_failed")}</pre>`}
    ${result && html`<${Panel} part="result" title=${t("found")} tools=${html`<${Tools} name=${own.name} python=${pythonOf(own, values)} table=${numbers(result.rows)} />`}><p><b>${t("claim")}</b> ${tr(result.claim)}</p><p style=${{ margin: "6px 0 12px" }}><b>${t("found")}</b> ${tr(result.found)}</p>${job.figure && html`<img class="figure" src=${job.figure} alt=${t("lab_" + own.name)} />`}<${Table} rows=${result.rows} /></${Panel}>`}`;
}

function pythonOf(own, values) {
  const written = Object.entries(values).map(([name, value]) => `${name.replace(/^--/, "").replace(/-/g, "_")}=${/,/.test(value) ? `(${value})` : value}`);
  return `from clearhead.lab.${own.name} import ${own.name}\n\nresult = ${own.name}(${written.join(", ")})\nprint(result.found)`;
}

function numbers(rows) {
  if (!rows || !rows.length) return null;
  const columns = Object.keys(rows[0]).filter((name) => rows.every((row) => typeof row[name] === "number" || row[name] === null));
  const named = Object.keys(rows[0]).find((name) => typeof rows[0][name] === "string");
  return { rows: rows.map((row, n) => (named ? row[named] : n)), columns, values: rows.flatMap((row) => columns.map((name) => row[name] ?? NaN)) };
}

function Table({ rows }) {
  const { t } = useStudio();
  if (!rows || !rows.length) return null;
  const shown = (x) => (typeof x === "number" ? number(x) : x === null ? "–" : String(x));
  return html`<div class="scroll" tabindex="0" role="group" aria-label=${t("table")}><table class="plain"><thead><tr>${Object.keys(rows[0]).map((name) => html`<th key=${name} scope="col" class=${typeof rows[0][name] === "number" ? "num" : ""}>${name}</th>`)}</tr></thead><tbody>${rows.map((row, n) => html`<tr key=${n}>${Object.values(row).map((x, c) => html`<td class=${typeof x === "number" || x === null ? "num" : ""} key=${c}>${shown(x)}</td>`)}</tr>`)}</tbody></table></div>`;
}
