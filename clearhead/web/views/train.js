import { html, useState, useEffect, useRef, useStudio, useAnswer, number } from "../ui.js";
import { Chart, Legend, Status, Thumbnail } from "../parts.js";

export function Train() {
  const { t, source, fail, args } = useStudio();
  const recipes = useAnswer("recipes", {}), [runs, putRuns] = useState(null), [form, put] = useState({ recipe: "chars", data: "", steps: 200, name: "mine" });
  const [chosen, putChosen] = useState([]), [curves, putCurves] = useState({}), [frame, putFrame] = useState(-1), live = useRef(true);
  const since = useRef({});
  useEffect(() => {
    live.current = true;
    const tick = async () => {
      while (live.current) {
        try {
          const found = await source.ask("runs", {});
          if (!live.current) return;
          putRuns(found.runs);
          const names = chosen.length ? chosen : found.runs.slice(0, 1).map((run) => run.name);
          for (const name of names) {
            const more = await source.ask("follow", { run: name, since: since.current[name] || 0 });
            since.current[name] = more.next;
            if (live.current && more.points.length) putCurves((old) => ({ ...old, [name]: [...(more.restart ? [] : old[name] || []), ...more.points] }));
          }
        } catch (error) { fail(error); }
        await new Promise((next) => setTimeout(next, 1000));
      }
    };
    tick();
    return () => { live.current = false; };
  }, [chosen.join()]);
  const act = (question, more) => source.ask(question, more).catch(fail);
  if (!runs || !recipes.answer) return html`<${Status} state=${recipes} />`;
  const names = chosen.length ? chosen : runs.slice(0, 1).map((run) => run.name), own = runs.find((run) => run.name === names[0]);
  const pick = (key) => names.map((name) => ({ name: `${name} ${key.startsWith("val") ? t("val_loss") : t("loss")}`, points: (curves[name] || []).filter((p) => p[key] !== undefined).map((p) => [p.step, p[key]]) }));
  const samples = own ? (curves[own.name] || []).filter((p) => p.sample).slice(-3) : [];
  return html`<p class="help">${t("train_help")}</p><div class="cols wide"><div><section class="panel"><div class="row"><label>${t("recipe")} <select value=${form.recipe} onChange=${(e) => put({ ...form, recipe: e.target.value })}>${recipes.answer.recipes.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label><label>${t("data")} <input value=${form.data} onInput=${(e) => put({ ...form, data: e.target.value })} /></label><label>${t("steps_count")} <input type="number" min="1" value=${form.steps} onInput=${(e) => put({ ...form, steps: +e.target.value })} /></label><label>${t("name")} <input value=${form.name} onInput=${(e) => put({ ...form, name: e.target.value })} /></label><button class="do main" onClick=${() => act("start", { kind: "train", ...form })}>${t("start")}</button></div></section>
    <section class="panel"><h2>${t("runs")}</h2>${!runs.length && html`<p class="note">${t("no_runs")}</p>`}<table class="plain"><tbody>${runs.map((run) => html`<tr key=${run.name}><td><label><input type="checkbox" checked=${names.includes(run.name)} onChange=${(e) => putChosen(e.target.checked ? [...new Set([...names, run.name])] : names.filter((name) => name !== run.name))} /> <span>${run.name}</span></label></td><td class="num">${run.step}/${run.steps}</td><td>${t(run.state)}</td><td>${run.state === "running" && run.job ? html`<button class="do" onClick=${() => act("stop", { id: run.job })}>${t("stop")}</button>` : run.state === "stopped" ? html`<button class="do" onClick=${() => act("start", { kind: "train", name: run.name, resume: true })}>${t("resume")}</button>` : ""}</td></tr>`)}</tbody></table></section></div>
  <div><section class="panel" data-part="curves"><h2>${t("loss")}</h2><${Chart} x=${t("step")} y=${t("loss")} curves=${[...pick("train/loss"), ...pick("val/loss")]} /><h3>${t("grad_norm")}</h3><${Chart} log=${true} x=${t("step")} y=${t("grad_norm")} height=${160} curves=${names.map((name) => ({ name, points: (curves[name] || []).filter((p) => p["grad_norm"] !== undefined).map((p) => [p.step, p["grad_norm"]]) }))} /></section>
    ${samples.length > 0 && html`<section class="panel"><h2>${t("samples")}</h2>${samples.map((p) => html`<pre class="block" tabindex="0" key=${p.step}>${t("step")} ${p.step}\n${p.sample}</pre>`)}</section>`}
    ${own && own.frames.length > 0 && html`<${Frames} run=${own} at=${frame < 0 ? own.frames.length - 1 : Math.min(frame, own.frames.length - 1)} onMove=${putFrame} />`}</div></div>`;
}

// The heads of a probe text at each checkpoint, with a slider over the steps.
function Frames({ run, at, onMove }) {
  const { t, args } = useStudio();
  const step = run.frames[at], found = useAnswer("probe", { run: run.name, step, text: "" }), answer = found.answer;
  return html`<section class="panel" data-part="frames"><h2>${t("frames", { s: step })}</h2><input type="range" aria-label=${t("step")} min="0" max=${run.frames.length - 1} value=${at} onInput=${(e) => onMove(+e.target.value)} /><${Status} state=${found} />
    ${answer && html`<div class="atlas">${answer.maps.map((map) => { const [count, rows, columns] = map.thumbnails.shape; return html`<div class="line" key=${map.place + map.layer}><span class="name">${t("layer")} ${map.layer}</span>${Array.from({ length: count }, (_, n) => html`<div class="thumb" key=${n}><${Thumbnail} values=${map.thumbnails.values.subarray(n * rows * columns, (n + 1) * rows * columns)} rows=${rows} columns=${columns} signed=${map.signed} top=${map.top} /><span>${t("head")} ${map.heads[n].head}</span></div>`)}</div>`; })}</div><${Legend} kind="weight" low="0" high="1" />`}</section>`;
}
