// Change the computation and see what happens to the prediction.
import { html, useState, useRef, useEffect, useStudio, useAnswer, layerName } from "../ui.js";
import { css, ink, largest } from "../colours.js";
import { number, visible } from "../format.js";
import { Choice, Legend, Panel, Status, Tools } from "../parts/panel.js";
import { Tokens } from "../parts/tokens.js";
import { Versus, merge } from "../parts/versus.js";

function read(text) {
  try { const out = JSON.parse(text || "[]"); return Array.isArray(out) ? out : []; } catch { return []; }
}
const FIELDS = ["kind", "layer", "place", "head", "part", "position"];
const same = (a, b) => FIELDS.every((name) => a[name] === b[name]);

export function Intervene() {
  const { t, go, state, args } = useStudio();
  const heads = useAnswer("atlas", args), tokens = useAnswer("tokens", args), model = useAnswer("model", { model: args.model }).answer;
  const changes = read(state.changes), [past, putPast] = useState([]), [how, putHow] = useState({ do: "zero", by: 2 });
  const row = tokens.answer ? (state.query >= 0 && state.query < tokens.answer.labels.length ? state.query : tokens.answer.labels.length - 1) : -1;
  const result = useAnswer("intervene", { ...args, row, changes }, row >= 0 && tokens.fresh && Boolean(tokens.answer.predicts)), answer = result.answer;
  const set = (next) => { putPast([...past, state.changes]); go({ changes: next.length ? JSON.stringify(next) : "" }, true); };
  const undo = () => { go({ changes: past[past.length - 1] || "" }); putPast(past.slice(0, -1)); };
  const toggle = (change) => { const at = changes.findIndex((one) => same(one, change)); set(at >= 0 ? changes.filter((_, n) => n !== at) : [...changes, { ...change, do: how.do, ...(how.do === "scale" ? { by: how.by } : {}) }]); };
  if (!heads.answer || !tokens.answer || !model) return html`<${Status} state=${heads.error ? heads : tokens} />`;
  if (!tokens.answer.predicts) return html`<p class="note">${t("no_predictions")}</p>`;
  const labels = tokens.answer.labels;
  return html`<div class="cols"><div>
    <${Panel} title=${t("switches")} part="switches" note=${t("switches_help")} tools=${html`<div class="row"><button class="do" disabled=${!past.length} onClick=${undo}>${t("undo")}</button><button class="do" disabled=${!changes.length} onClick=${() => set([])}>${t("clear")}</button></div>`}>
      <div class="row"><${Choice} label=${t("action")} value=${how.do} options=${["zero", "mean", "scale"].map((name) => [name, t(name)])} onPick=${(name) => putHow({ ...how, do: name })} />${how.do === "scale" && html`<label>${t("by")} <input type="number" step="0.1" value=${how.by} onInput=${(event) => putHow({ ...how, by: +event.target.value })} /></label>`}</div>
      <${Board} maps=${heads.answer.maps} row=${row} isOn=${(change) => changes.some((one) => same(one, change))} onToggle=${toggle} model=${model} />
    </${Panel}>
    <${Panel} title=${t("edit_token")} part="edit" note=${t("edit_help")}><${EditToken} labels=${labels} ids=${tokens.answer.ids} onAdd=${(change) => set([...changes.filter((one) => !same(one, change)), change])} /></${Panel}>
    <${Panel} title=${t("patch")} part="patch" note=${t("patch_help")}><${Patch} labels=${labels} layers=${model.layers} place=${model.kind === "EncoderDecoder" ? "decoder" : "stack"} onAdd=${(change) => set([...changes, change])} /></${Panel}></div>
  <div><${Panel} title=${answer ? t("next_after_" + answer.predicts.replace(" ", "_"), { t: visible(answer.label) }) : t("after")} part="effect" busy=${result.busy} tools=${answer && html`<${Tools} python=${answer.python} name="intervention" table=${{ rows: answer.after.map((one) => one.text), columns: ["after"], values: answer.after.map((one) => one.probability) }} />`}>
      <ul class="changes">${changes.map((one, n) => html`<li key=${n}>${describe(t, one, labels)}<button class="quiet" aria-label=${`${t("remove")} ${describe(t, one, labels)}`} onClick=${() => set(changes.filter((_, m) => m !== n))}>×</button></li>`)}</ul>
      ${!changes.length && html`<p class="note">${t("no_changes")}</p>`}<${Status} state=${result} />
      ${answer && html`<${Versus} items=${merge(answer.before, answer.after)} names=${[t("before"), t("after")]} /><p class="note" data-divergence=${answer.divergence}>${t("divergence", { x: number(answer.divergence, 3) })}</p>`}
      <details open=${false}><summary class="note">${t("at_position", { t: visible(labels[row]) })}</summary><${Tokens} labels=${labels} selected=${row} onSelect=${(n) => go({ query: n })} /></details></${Panel}></div></div>`;
}

function describe(t, one, labels) {
  const how = one.do === "scale" ? `× ${one.by}` : t("did_" + (one.do || "zero"));
  if (one.kind === "head") return `${layerName(t, one.place, one.layer)} ${t("head")} ${one.head}: ${how}`;
  if (one.kind === "branch") return `${layerName(t, one.place, one.layer)} ${t(one.part)}: ${how}`;
  if (one.kind === "token") return `${visible(labels[one.position] || "?")} → ${visible(one.token)}`;
  return t("patched", { l: layerName(t, one.place, one.layer), p: visible(labels[one.position] || "?"), t: one.text });
}

// All heads as switches. After measuring, the colour is the effect of removing the head.
function Board({ maps, row, isOn, onToggle, model }) {
  const { t, args, state, source, fail, dark } = useStudio();
  const [effects, put] = useState({}), [busy, putBusy] = useState(false), [token, putToken] = useState(""), [python, putPython] = useState(""), run = useRef(0);
  const stop = () => { run.current++; putBusy(false); };
  useEffect(() => { stop(); put({}); }, [args, row, state.token]);
  useEffect(() => () => { run.current++; }, []);
  const measure = async () => {
    const own = ++run.current;
    put({});
    putBusy(true);
    for (const map of maps) for (const { head } of map.heads) {
      if (own !== run.current) return;
      try {
        const found = await source.ask("ablate", { ...args, row, layer: map.layer, place: map.place, head, token: state.token });
        if (own !== run.current) return;
        putToken(found.token[0]);
        putPython(found.python);
        put((old) => ({ ...old, [`${map.place}.${map.layer}.${head}`]: found.effect }));
      } catch (error) { fail(error); stop(); return; }
    }
    putBusy(false);
  };
  const top = largest(Object.values(effects)) || 1, scale = { kind: "signed", top, dark }, measured = Object.keys(effects).length;
  const chip = (change, text, label, effect) => html`<button class="chip" key=${text} aria-pressed=${isOn(change)} aria-label=${label} title=${effect === undefined ? label : `${label}: ${number(effect, 3)}`} style=${effect === undefined ? {} : { background: css(effect, scale), color: ink(effect, scale) }} onClick=${() => onToggle(change)}>${text}</button>`;
  const order = Object.entries(effects).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 3);
  return html`<div class="board">${maps.map((map) => { const stack = map.place === "cross" ? "decoder" : map.place, name = layerName(t, map.place, map.layer);
    return html`<div class="line" key=${map.place + map.layer}><span class="name">${name}</span><span class="heads">${map.heads.map((each) => chip({ kind: "head", place: map.place, layer: map.layer, head: each.head }, String(each.head), `${name} ${t("head")} ${each.head}`, effects[`${map.place}.${map.layer}.${each.head}`]))}</span>
      <span class="heads">${(map.place === "cross" ? ["cross"] : ["mixer", ...(model.branches.includes("ffn") ? ["ffn"] : [])]).map((part) => chip({ kind: "branch", place: stack, layer: map.layer, part }, t(part), `${name} ${t(part)}`))}</span></div>`; })}</div>
    <div class="row" style=${{ marginTop: "12px" }}>${busy ? html`<button class="do" data-act="stop" onClick=${stop}>${t("stop")}</button>` : html`<button class="do" data-act="measure" onClick=${measure}>${t("ablate_all")}</button>`}${measured > 0 && html`<span class="note" data-measured=${measured}>${t("ablation", { t: visible(token) })}${order.length > 0 ? " " + t("ablation_top", { list: order.map(([key, value]) => `${key.replace(/^stack\./, "")} (${number(value, 2)})`).join(", ") }) : ""}</span>`}</div>
    ${measured > 0 && html`<${Legend} kind="signed" low=${number(-top, 3)} high=${number(top, 3)} text=${t("legend_effect")} /><${Tools} python=${python} name="ablation" table=${{ rows: Object.keys(effects), columns: ["effect"], values: Object.values(effects) }} />`}`;
}

function EditToken({ labels, ids, onAdd }) {
  const { t } = useStudio(), [at, putAt] = useState(-1), [typed, put] = useState("");
  const add = (event) => { event.preventDefault(); if (typed) onAdd({ kind: "token", place: "stack", layer: 0, position: at, token: typed }); };
  if (!ids.length) return null;
  return html`<${Tokens} labels=${labels} selected=${at} onSelect=${(n) => { putAt(n); put(labels[n].replace(/·\d+\/\d+$/, "")); }} />
    ${at >= 0 && html`<form class="row" style=${{ marginTop: "8px" }} onSubmit=${add}><label>${t("replace_by", { t: visible(labels[at]) })} <input value=${typed} onInput=${(event) => put(event.target.value)} /></label><button class="do">${t("apply")}</button></form>`}`;
}

function Patch({ labels, layers, place, onAdd }) {
  const { t, args } = useStudio(), [other, put] = useState({ text: args.text, layer: 0, position: 0 });
  const layerList = Array.from({ length: layers }, (_, n) => [String(n), `${t("layer")} ${n}`]);
  return html`<form class="row" onSubmit=${(event) => { event.preventDefault(); onAdd({ kind: "patch", place, ...other }); }}><label>${t("other_text")} <input value=${other.text} size="34" onInput=${(event) => put({ ...other, text: event.target.value })} /></label>
    <${Choice} label=${t("after_layer")} value=${String(other.layer)} options=${layerList} onPick=${(layer) => put({ ...other, layer: +layer })} />
    <${Choice} label=${t("position")} value=${String(other.position)} options=${labels.map((label, n) => [String(n), `${n} ${visible(label)}`])} onPick=${(position) => put({ ...other, position: +position })} /><button class="do" disabled=${!other.text || other.text === args.text}>${t("add")}</button></form>`;
}
