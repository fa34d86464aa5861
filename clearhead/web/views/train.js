// Start, stop and resume runs; watch curves, samples, heads and gradients grow.
import { html, useState, useEffect, useRef, useStudio, useAnswer, layerName, tagWord } from "../ui.js";
import { largest } from "../colours.js";
import { number } from "../format.js";
import { Choice, Legend, Panel, Status, Tools } from "../parts/panel.js";
import { Chart } from "../parts/chart.js";
import { HeatMap } from "../parts/heatmap.js";
import { headsOf, Picture } from "../parts/heads.js";

const PAUSE = 800; // milliseconds between two looks at the runs
const BEAT = 350; // milliseconds between two frames of a film

// The runs, and the points of the chosen ones; both grow while runs go on.
function useRuns(chosen) {
  const { source, fail } = useStudio();
  const [runs, putRuns] = useState(null), [points, putPoints] = useState({}), since = useRef({});
  useEffect(() => {
    let live = true;
    const look = async () => {
      const found = (await source.ask("runs", {})).runs;
      if (!live) return;
      putRuns(found);
      for (const name of chosen.length ? chosen : found.slice(0, 1).map((run) => run.name)) {
        const more = await source.ask("follow", { run: name, since: since.current[name] || 0 });
        since.current[name] = more.next;
        if (live && (more.points.length || more.restart)) putPoints((old) => ({ ...old, [name]: [...(more.restart ? [] : old[name] || []), ...more.points] }));
      }
    };
    const tick = async () => {
      while (live) {
        try { await look(); } catch (error) { fail(error); }
        await new Promise((next) => setTimeout(next, PAUSE));
      }
    };
    tick();
    return () => { live = false; };
  }, [chosen.join()]);
  return [runs, points];
}

export function Train() {
  const { t, info } = useStudio(), [chosen, choose] = useState([]), [at, putAt] = useState(-1);
  const [runs, points] = useRuns(chosen);
  if (!info.runs) return html`<p class="note">${t("no_runs_dir")} <code>clearhead studio --runs runs</code></p>`;
  if (!runs) return html`<p class="busy" role="status">${t("loading")}</p>`;
  const names = chosen.length ? chosen.filter((name) => runs.some((run) => run.name === name)) : runs.slice(0, 1).map((run) => run.name);
  const own = runs.find((run) => run.name === names[0]);
  const frame = own && own.frames.length ? (at >= 0 ? own.frames.reduce((best, step) => (Math.abs(step - at) < Math.abs(best - at) ? step : best)) : own.frames[own.frames.length - 1]) : -1;
  return html`<div class="cols wide"><div>${info.train && html`<${Start} onStart=${(name) => choose([name])} />`}<${Runs} runs=${runs} names=${names} choose=${choose} /></div>
  <div>${names.length > 0 && html`<${Curves} names=${names} points=${points} folder=${own.folder} at=${frame} onPick=${putAt} />
    ${own && own.frames.length > 0 && html`<${Film} run=${own} frame=${frame} onMove=${putAt} />`}
    ${own && html`<${Samples} points=${points[own.name] || []} at=${at} folder=${own.folder} />`}`}</div></div>`;
}

function Start({ onStart }) {
  const { t, tr, source, fail } = useStudio();
  const recipes = useAnswer("recipes", {}).answer, [form, put] = useState({ recipe: "chars", data: "", steps: 200, name: "", probe: "" });
  const field = (name, props) => html`<label>${t("form_" + name)} <input value=${form[name]} ...${props} onInput=${(event) => put({ ...form, [name]: props.type === "number" ? +event.target.value : event.target.value })} /></label>`;
  const go = (event) => {
    event.preventDefault();
    const name = form.name || `${form.recipe}-${new Date().toISOString().slice(11, 19).replace(/:/g, "")}`;
    source.ask("start", { kind: "train", ...form, name }).then(() => onStart(name), fail);
  };
  if (!recipes) return null;
  return html`<${Panel} title=${t("new_run")} part="start"><form class="form" onSubmit=${go}><${Choice} label=${t("recipe")} value=${form.recipe} options=${recipes.recipes.map((one) => [one.name, one.name])} onPick=${(recipe) => put({ ...form, recipe })} />
    <p class="note">${tr((recipes.recipes.find((one) => one.name === form.recipe) || { help: "" }).help)}</p>
    ${field("data", { placeholder: t("built_in_data") })}${field("steps", { type: "number", min: 1 })}${field("name", { placeholder: t("name_auto") })}${field("probe", { placeholder: t("probe_auto") })}
    <div class="row end"><button class="do main" data-act="start">${t("start")}</button></div></form></${Panel}>`;
}

function Runs({ runs, names, choose }) {
  const { t, go, source, fail, info, refresh } = useStudio();
  const act = (question, more) => source.ask(question, more).catch(fail);
  const open = (run) => refresh().then(() => go({ model: run.name, view: "atlas", open: false, cell: "", step: "", changes: "" }, true));
  const compare = (run) => refresh().then(() => go({ model: run.models[1], otherModel: run.name, compare: true, view: "atlas", open: false, cell: "", step: "", changes: "" }, true));
  const button = (run) => run.state === "running" && run.job ? html`<button class="do" onClick=${() => act("stop", { id: run.job })}>${t("stop")}</button>`
    : html`${run.state === "stopped" && info.train && html`<button class="do" onClick=${() => act("start", { kind: "train", name: run.name, resume: true })}>${t("resume")}</button>`}${run.opens && info.train && html`<button class="do" onClick=${() => open(run)}>${t("look_inside")}</button>${run.models.length > 1 && html`<button class="do" data-act="before-after" title=${t("before_after_help")} onClick=${() => compare(run)}>${t("before_after")}</button>`}`}`;
  return html`<${Panel} title=${t("runs")} part="runs">${!runs.length && html`<p class="note">${t("no_runs")}</p>`}
    ${runs.map((run) => html`<div key=${run.name} data-run=${run.name} data-state=${run.state} style=${{ padding: "6px 0", borderTop: "1px solid var(--line)" }}><div class="row"><label><input type="checkbox" checked=${names.includes(run.name)} onChange=${(event) => choose(event.target.checked ? [...new Set([...names, run.name])] : names.filter((name) => name !== run.name))} /> <b>${run.name}</b></label><span class="grow"></span><span class="note">${t("state_" + run.state)}</span></div>
      <div class="row"><div class="meter grow" aria-hidden="true"><i style=${{ width: (100 * run.step) / Math.max(run.steps, 1) + "%" }}></i></div><span class="num">${run.step}/${run.steps}</span>${button(run)}</div>${run.problem && html`<pre class="block error">${run.problem}</pre>`}</div>`)}</${Panel}>`;
}

function Curves({ names, points, folder, at, onPick }) {
  const { t } = useStudio();
  const curve = (name, key, word, faint) => ({ name: names.length > 1 ? `${name} · ${word}` : word, faint, points: (points[name] || []).filter((p) => typeof p[key] === "number").map((p) => [p.step, p[key]]) });
  const losses = names.flatMap((name) => [curve(name, "train/loss", t("loss"), true), curve(name, "val/loss", t("val_loss"))]);
  const table = names.length === 1 && (points[names[0]] || []);
  return html`<${Panel} title=${t("loss")} part="curves" tools=${table && table.length > 0 && html`<${Tools} name=${names[0]} python=${`from clearhead.training.run import Run\n\nfor line in Run(${JSON.stringify(folder)}).history():\n    print(line["step"], line["train/loss"])`} table=${{ rows: table.map((p) => p.step), columns: ["train/loss", "val/loss", "grad_norm"], values: table.flatMap((p) => [p["train/loss"] ?? NaN, p["val/loss"] ?? NaN, p.grad_norm ?? NaN]) }} />`}>
    <${Chart} x=${t("step")} y=${t("loss")} curves=${losses} at=${at} onPick=${onPick} name="loss" />
    <h3>${t("grad_norm")}</h3><${Chart} log=${true} x=${t("step")} y=${t("grad_norm")} height=${170} curves=${names.map((name) => curve(name, "grad_norm", t("grad_norm")))} at=${at} onPick=${onPick} name="gradient" /></${Panel}>`;
}

// The heads of a probe text at each recorded step, with a slider over the steps that can play by itself.
function Film({ run, frame, onMove }) {
  const { t, dark } = useStudio(), [playing, play] = useState(false), at = run.frames.indexOf(frame);
  const found = useAnswer("probe", { run: run.name, step: frame }), answer = found.answer;
  useEffect(() => {
    if (!playing) return undefined;
    const timer = setTimeout(() => { if (at + 1 < run.frames.length) onMove(run.frames[at + 1]); else play(false); }, BEAT);
    return () => clearTimeout(timer);
  }, [playing, at, run.frames.length]);
  const start = () => { if (at + 1 >= run.frames.length) onMove(run.frames[0]); play(true); };
  return html`<${Panel} title=${t("frames", { s: frame })} part="frames" note=${answer && answer.text ? t("probe_of", { t: answer.text }) : ""} tools=${answer && html`<${Tools} python=${answer.python} />`}>
    <div class="row"><button class="do" data-act="play" onClick=${() => (playing ? play(false) : start())}>${t(playing ? "pause" : "play")}</button><input class="grow" style=${{ flex: 1 }} type="range" aria-label=${t("step")} min="0" max=${run.frames.length - 1} value=${at} onInput=${(event) => { play(false); onMove(run.frames[+event.target.value]); }} /><span class="num">${t("step")} ${frame}</span></div>
    <${Status} state=${found} />
    ${answer && html`<div class="atlas" data-frame=${frame}>${answer.maps.map((map) => html`<div class="line" key=${map.place + map.layer}><span class="name">${layerName(t, map.place, map.layer)}</span><div class="heads">${headsOf([map]).map((one) => html`<div class="thumb" key=${one.key}><${Picture} one=${one} /><span>${t("head")} ${one.head.head}</span><span class=${one.head.tag ? "tag" : ""}>${one.head.tag ? tagWord(t, one.head.tag) : ""}</span></div>`)}</div></div>`)}</div><${Legend} kind="weight" />
      ${answer.gradients && html`<h3>${t("gradients_by_block")}</h3><${Gradients} run=${run} />`}`}</${Panel}>`;
}

function Gradients({ run }) {
  const { t, dark } = useStudio(), answer = useAnswer("gradients", { run: run.name, count: run.frames.length }).answer;
  if (!answer) return null;
  const top = largest(answer.norms.values) || 1;
  return html`<${HeatMap} values=${answer.norms.values} rows=${answer.names} columns=${answer.steps.map(String)} scale=${{ kind: "magnitude", top, dark }} label=${t("gradients_by_block")} height=${18} limit=${22} /><${Legend} kind="magnitude" high=${number(top, 3)} text=${t("legend_gradient")} /><${Tools} python=${answer.python} name="gradients" table=${{ rows: answer.names, columns: answer.steps, values: answer.norms.values }} />`;
}

function Samples({ points, at, folder }) {
  const { t } = useStudio(), all = points.filter((p) => p.sample);
  if (!all.length) return null;
  const shown = at < 0 ? all.slice(-3).reverse() : all.filter((p) => p.step <= at).slice(-3).reverse();
  return html`<${Panel} title=${t("samples")} part="samples" tools=${html`<${Tools} python=${`from clearhead.training.run import Run\n\nfor line in Run(${JSON.stringify(folder)}).history():\n    if "sample" in line:\n        print(line["step"], line["sample"])`} />`}>${shown.map((p) => html`<div key=${p.step}><h3>${t("step")} ${p.step}</h3><pre class="block" tabindex="0">${p.sample}</pre></div>`)}</${Panel}>`;
}
