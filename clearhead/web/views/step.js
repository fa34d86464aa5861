// The numbers of one step as a map; a cell can be selected.
import { html, useState, useMemo, useStudio, useAnswer } from "../ui.js";
import { number } from "../format.js";
import { Choice, Legend, Panel, Status, Tools } from "../parts/panel.js";
import { HeatMap, heatSvg } from "../parts/heatmap.js";
import { stepWord } from "../parts/steps.js";

export function StepValues({ step, path, index, tokens }) {
  const { t, tr, has, go, state, args, dark } = useStudio(), [whole, putWhole] = useState(false);
  const three = index ? index.length === 3 : step && step.letters.length === 4 && step.letters[0] === "B";
  const logits = path === "head.logits", include = logits && index ? { include: index[1] } : {};
  const found = useAnswer("step", { ...args, path, head: three ? (index ? index[0] : state.head) : 0, ...include }), answer = found.answer;
  const square = /(scores|weights)$/.test(path), scored = path.endsWith(".scores");
  const mask = useAnswer("step", { ...args, path: path.replace(/scores$/, "weights"), head: answer ? answer.head : 0 }, scored && Boolean(answer) && !whole).answer;
  const word = stepWord(path), title = has("step_" + word) ? t("step_" + word) : path.split(".").pop();
  const [rows, columns] = answer ? answer.values.shape : [0, 0];
  const names = path.startsWith("encoder") || path.startsWith("source") ? tokens.source : tokens.labels;
  const [down, across] = useMemo(() => {
    const keys = path.includes(".cross.") && tokens.source ? tokens.source : names;
    const over = answer && answer.names ? answer.names : square ? keys : null;
    return [Array.from({ length: rows }, (_, n) => (rows === 1 ? "" : names && names[n]) || String(n)), Array.from({ length: columns }, (_, n) => (over && over[n] !== undefined ? over[n] : String(n)))];
  }, [answer, path, tokens]);
  if (!answer) return html`<${Panel} title=${title}>${found.error ? html`<p class="note">${tr(found.error)}</p>` : html`<${Status} state=${found} />`}</${Panel}>`;
  const kind = /(weights|router)$/.test(path) ? "weight" : "signed", top = kind === "weight" ? 1 : Math.max(Math.abs(answer.least), Math.abs(answer.most)) || 1;
  const scale = { kind, top, dark }, values = answer.values.values, hide = scored && mask && mask.path.endsWith("weights") ? mask.values.values : kind === "weight" ? values : null;
  const column = (c) => (answer.ids ? answer.ids[c] : c);
  const own = !index ? [-1, -1] : three ? index.slice(1) : index.length === 1 ? [0, index[0]] : [index[0], answer.ids ? answer.ids.indexOf(index[1]) : index[1]];
  const flat = rows === 1 && !(step && step.letters.includes("T"));
  const pick = (r, c, quiet) => go({ step: path, cell: (three ? [answer.head, r, c] : flat ? [c] : [r, column(c)]).join(","), query: r, ...(square ? { key: c } : {}) }, !quiet);
  return html`<${Panel} title=${title} part="values" busy=${found.busy} note=${has("about_step_" + word) ? t("about_step_" + word) : ""}
      tools=${html`<${Tools} python=${answer.python} name=${path} table=${{ rows: down, columns: across, values }} svg=${rows * columns < 20000 ? () => heatSvg(down, across, values, scale) : null} />`}>
    <div class="row"><code>${path}</code>${step && html`<span class="note">${tr(step.formula)} · <span class="num">[${step.letters.join(", ")}] = [${step.shape.join(", ")}]</span></span>`}<span class="grow"></span>
      ${answer.heads > 1 && html`<${Choice} label=${t("head")} value=${String(answer.head)} options=${Array.from({ length: answer.heads }, (_, n) => [String(n), String(n)])} onPick=${(head) => go({ head: +head, cell: "" })} />`}
      ${scored && html`<label><input type="checkbox" checked=${whole} onChange=${(event) => putWhole(event.target.checked)} /> ${t("show_masked")}</label>`}</div>
    <${HeatMap} values=${values} rows=${down} columns=${across} scale=${scale} selected=${own} onSelect=${pick} limit=${24} label=${`${path}, ${rows} × ${columns}`} hidden=${hide ? (n) => hide[n] === 0 : null} key=${scored ? String(Boolean(hide)) : ""} />
    <${Legend} kind=${kind} low=${kind === "weight" ? "0" : number(-top, 3)} high=${number(top, 3)} />
    ${answer.columns > columns && html`<p class="note">${t(answer.ids ? "likeliest_columns" : "first_columns", { n: columns, m: answer.columns.toLocaleString("en") })}</p>`}</${Panel}>`;
}
