// Every step of the model in order, with its numbers; and where each number comes from.
import { html, useMemo, useRef, useStudio, useAnswer } from "../ui.js";
import { Panel, Status, Tools } from "../parts/panel.js";
import { Thumbnail } from "../parts/heatmap.js";
import { Explanation } from "../parts/explanation.js";
import { StepValues } from "./step.js";
import { inside, isBlock, sectionOf, stepWord } from "../parts/steps.js";

// Steps that are computed side by side stand side by side.
const ROWS = [["query", "key", "value"], ["query_norm", "key_norm"], ["query_rotated", "key_rotated"], ["scores", "weights"], ["mixed", "concat", "out"], ["gate", "up", "down"], ["tokens", "position", "segments"], ["up", "down"]];
function arrange(steps) {
  const out = [];
  for (const step of steps) {
    const word = stepWord(step.name), row = out[out.length - 1], last = row && row.map((each) => stepWord(each.name));
    if (row && ROWS.some((names) => names.includes(word) && last.every((each) => names.includes(each) && each !== word))) row.push(step);
    else out.push([step]);
  }
  return out;
}

export function Flow() {
  const { t, go, state, args } = useStudio(), detail = useRef(null);
  const steps = useAnswer("flow", args), tokens = useAnswer("tokens", args), list = steps.answer ? steps.answer.steps : [];
  const sections = useMemo(() => [...new Set(list.map((step) => sectionOf(step.name)))], [steps.answer]);
  if (!steps.answer || !tokens.answer) return html`<${Status} state=${steps.error ? steps : tokens} />`;
  const chosen = list.some((step) => step.name === state.step) || (state.step && isBlock(state.step)) ? state.step : (list.find((step) => /mixer\.weights$/.test(step.name)) || list[0]).name;
  const section = sectionOf(chosen), index = state.cell ? state.cell.split(",").map(Number) : null;
  const open = (name) => { const first = list.find((step) => sectionOf(step.name) === name); go({ step: first.name, cell: "" }, true); };
  const title = (name) => (isBlock(name) ? `${name.startsWith("stack") ? "" : t("place_" + name.split(".")[0]) + " "}${t("block")} ${name.split(".")[2]}` : name.startsWith("output") ? t(name === "output." ? "output" : "final_norm") : t("section_" + name));
  const follow = (path, at) => go({ step: path, cell: at.join(","), ...(at.length === 3 ? { head: at[0] } : {}) }, true);
  return html`<nav class="route" aria-label=${t("steps")}>${sections.map((name, n) => html`${n > 0 && html`<span aria-hidden="true">→</span>`}<button key=${name} data-section=${name} aria-current=${name === section} onClick=${() => open(name)}>${title(name)}</button>`)}</nav>
  <div class="flow">
    <${Panel} title=${title(section)} part="diagram" note=${isBlock(section) ? t("block_help") : ""} tools=${html`<${Tools} python=${steps.answer.python} />`}>
      <${Diagram} steps=${list.filter((step) => sectionOf(step.name) === section)} section=${section} chosen=${chosen} detail=${detail} />
    </${Panel}>
    <div class="detail" ref=${detail}><${StepValues} step=${list.find((step) => step.name === chosen)} path=${chosen} index=${index} tokens=${tokens.answer} />
      <section class="panel" data-part="explanation"><${Explanation} path=${index ? chosen : ""} index=${index} onGo=${follow} /></section></div>
  </div>`;
}

// On a narrow screen the values stand below the diagram.
const diagramEnd = (element) => element.previousElementSibling.offsetTop + 40;

function Diagram({ steps, section, chosen, detail }) {
  const { t, tr, has, go, args, state } = useStudio();
  const strips = useAnswer("strips", { ...args, section, head: state.head }), found = strips.answer ? strips.answer.strips : {};
  const card = (step) => {
    const word = stepWord(step.name), strip = found[step.name], square = /(scores|weights)$/.test(step.name);
    const name = has("step_" + word) ? t("step_" + word) : inside(step.name);
    return html`<button key=${step.name} class=${"card" + (square ? " square" : "") + (word === "mixed" ? " far" : "")} data-step=${step.name} aria-current=${step.name === chosen} title=${`${step.name}\n${tr(step.formula)}`} onClick=${() => { go({ step: step.name, cell: "" }, true); if (detail.current && detail.current.offsetTop > diagramEnd(detail.current)) detail.current.scrollIntoView(); }}>
      <b>${name}</b><small>${tr(step.formula)}</small><small class="num">${step.letters.filter((letter) => letter !== "B").join("×")} = ${step.shape.slice(step.letters[0] === "B" ? 1 : 0).join("×")}</small>
      ${strip && html`<${Thumbnail} values=${strip.values.values} rows=${strip.values.shape[0]} columns=${strip.values.shape[1]} signed=${strip.signed} />`}</button>`;
  };
  return html`<div class="stream">${arrange(steps).map((row) => html`<div key=${row[0].name} class=${`stage-row n${row.length} ${/_residual$/.test(row[0].name) ? "joins" : ""}`}>${row.map(card)}</div>`)}</div>`;
}
