import { html, useState, useMemo, useStudio, useAnswer, number } from "../ui.js";
import { Explanation, HeatMap, Legend, Status, Tools, csvOf, svgOf } from "../parts.js";

const section = (name) => { const parts = name.split("."); return parts[1] === "blocks" ? parts.slice(0, 3).join(".") : parts[0] === "head" ? "head" : parts[parts.length - 1] === "final_norm" ? name : parts[0]; };
const short = (name) => { const parts = name.split("."); return parts[1] === "blocks" ? parts.slice(3).join(".") : name; };

export function Flow() {
  const { t, go, state, args } = useStudio();
  const steps = useAnswer("flow", args), tokens = useAnswer("tokens", args);
  const [shut, putShut] = useState({});
  const groups = useMemo(() => {
    const out = [];
    for (const step of steps.answer ? steps.answer.steps : []) {
      const name = section(step.name);
      if (!out.length || out[out.length - 1].name !== name) out.push({ name, steps: [] });
      out[out.length - 1].steps.push(step);
    }
    return out;
  }, [steps.answer]);
  if (!steps.answer || !tokens.answer) return html`<${Status} state=${steps.error ? steps : tokens} />`;
  const chosen = state.step || steps.answer.steps[0].name;
  const current = steps.answer.steps.find((step) => step.name === chosen);
  const index = state.cell ? state.cell.split(",").map(Number) : null;
  const openFirst = groups.findIndex((group) => group.name.includes("blocks"));
  const isOpen = (group, n) => shut[group.name] !== undefined ? !shut[group.name] : !group.name.includes("blocks") || n === openFirst || section(chosen) === group.name;
  return html`<p class="help">${t("flow_help")}</p><div class="cols three">
    <section class="panel steps" aria-label=${t("steps")} tabindex="0">${groups.map((group, n) => html`<div key=${group.name}>
      <h2><button class="fold" aria-expanded=${isOpen(group, n)} onClick=${() => putShut({ ...shut, [group.name]: isOpen(group, n) })}>${isOpen(group, n) ? "▾" : "▸"} ${group.name.includes("blocks") ? `${group.name.split(".")[0] === "stack" ? "" : group.name.split(".")[0] + " "}${t("block")} ${group.name.split(".")[2]}` : group.name}</button></h2>
      ${isOpen(group, n) && html`<ul>${group.steps.map((step) => html`<li key=${step.name}><button aria-current=${step.name === chosen} data-step=${step.name} onClick=${() => go({ step: step.name, cell: "" }, true)}>${short(step.name)}<small>${step.formula}</small><small class="num">[${step.letters.join(",")}] = [${step.shape.join(", ")}]</small></button></li>`)}</ul>`}
    </div>`)}<${Tools} python=${steps.answer.python} /></section>
    <${StepValues} step=${current} path=${chosen} index=${index} tokens=${tokens.answer} />
    <section class="panel" data-part="explanation"><${Explanation} path=${index ? chosen : ""} index=${index} onGo=${(path, at) => go({ step: path, cell: at.join(","), ...(at.length === 3 ? { head: at[0] } : {}) }, true)} /></section>
  </div>`;
}

export function StepValues({ step, path, index, tokens }) {
  const { t, go, state, args } = useStudio();
  const three = index ? index.length === 3 : step && step.letters.length === 4 && step.letters[0] === "B";
  const head = three && index ? index[0] : state.head;
  const found = useAnswer("step", { ...args, path, head: three ? head : 0 });
  const answer = found.answer;
  if (!answer) return html`<section class="panel"><h2>${path}</h2>${found.error ? html`<p class="note">${found.error}</p>` : html`<${Status} state=${found} />`}</section>`;
  const [rows, columns] = answer.values.shape, kind = path.endsWith("weights") || path.endsWith("router") ? "weight" : "signed";
  const names = path.startsWith("encoder") || path.startsWith("source") ? tokens.source : tokens.labels;
  const keyed = columns !== rows || !/(scores|weights)$/.test(path);
  const across = keyed ? Array.from({ length: columns }, (_, n) => (/(scores|weights)$/.test(path) && tokens.source ? tokens.source[n] || String(n) : String(n))) : names;
  const down = Array.from({ length: rows }, (_, n) => (rows === 1 ? "" : names && names[n]) || String(n));
  const top = kind === "weight" ? 1 : Math.max(Math.abs(answer.least), Math.abs(answer.most)) || 1, scale = { signed: kind === "signed", top };
  const own = index && path ? (three ? index.slice(1) : index.length === 1 ? [0, index[0]] : index) : [-1, -1];
  const pick = (r, c, quiet) => go({ step: path, cell: (three ? [answer.head, r, c] : rows === 1 && !(step && step.letters.includes("T")) ? [c] : [r, c]).join(","), query: r }, !quiet);
  return html`<section class="panel" data-part="values"><h2>${path}</h2>
    ${step && html`<p class="crumbs">${step.formula} · <span class="num">[${step.letters.join(", ")}] = [${step.shape.join(", ")}]</span></p>`}
    ${answer.heads > 1 && html`<label>${t("head")} <select value=${answer.head} onChange=${(e) => go({ head: +e.target.value, cell: "" })}>${Array.from({ length: answer.heads }, (_, n) => html`<option key=${n} value=${n}>${n}</option>`)}</select></label>`}
    <${HeatMap} values=${answer.values.values} rows=${down} columns=${across} scale=${scale} selected=${own} onSelect=${pick} label=${`${path}, ${rows} × ${columns}`} />
    <${Legend} kind=${kind} low=${kind === "weight" ? "0" : number(-top, 3)} high=${number(top, 3)} />
    <${Tools} python=${answer.python} name=${path} csv=${() => csvOf(down, across, answer.values.values, columns)} svg=${rows * columns < 20000 ? () => svgOf(down, across, answer.values.values, scale) : null} /></section>`;
}
