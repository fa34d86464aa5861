// One head: its map or its lines, what each token reads, the arithmetic of a cell, and what would happen if …
import { html, useState, useMemo, useEffect, useRef, useStudio, useAnswer, layerName, tagWord } from "../ui.js";
import { largest } from "../colours.js";
import { number, percent, visible } from "../format.js";
import { Choice, Legend, Panel, Slider, Status, Switch, Tools } from "../parts/panel.js";
import { HeatMap, heatSvg } from "../parts/heatmap.js";
import { Explanation } from "../parts/explanation.js";

// The largest weight that is neither on the first key nor on the diagonal: the one that tells most.
function strongest({ shape: [rows, columns], values }) {
  let best = -1, at = [rows - 1, 0];
  for (let r = Math.min(2, rows - 1); r < rows; r++) for (let c = 1; c < columns; c++)
    if (values[r * columns + c] > best && c !== r) { best = values[r * columns + c]; at = [r, c]; }
  return at;
}

// Weights without the first key, each row summing to 1 again.
function withoutFirst({ shape: [rows, columns], values }) {
  const out = Float32Array.from(values);
  for (let r = 0; r < rows; r++) {
    let left = 0;
    out[r * columns] = 0;
    for (let c = 1; c < columns; c++) left += out[r * columns + c];
    if (left > 0) for (let c = 1; c < columns; c++) out[r * columns + c] /= left;
  }
  return out;
}

export function HeadView() {
  const { t, go, state, args, other, dark } = useStudio();
  const wanted = { ...args, layer: state.layer, place: state.place || null, head: state.head };
  const found = useAnswer("head", wanted), answer = found.answer, atlas = useAnswer("atlas", args).answer;
  const [form, putForm] = useState("map"), [bare, putBare] = useState(false), title = useRef(null);
  useEffect(() => { if (title.current) title.current.focus({ preventScroll: true }); }, [answer && answer.layer, answer && answer.head]);
  const start = useMemo(() => (answer && answer.weights ? strongest(answer.weights) : [0, 0]), [answer]);
  const values = useMemo(() => answer && answer.weights && (bare ? withoutFirst(answer.weights) : answer.weights.values), [answer, bare]);
  if (!answer) return html`<p class="crumbs"><button class="do" onClick=${() => go({ open: false }, true)}>← ${t("back")}</button></p><${Status} state=${found} />`;
  const last = [answer.queries.length - 1, answer.keys.length - 1];
  const query = state.query >= 0 ? Math.min(state.query, last[0]) : start[0], key = state.key >= 0 ? Math.min(state.key, last[1]) : start[1];
  const columns = answer.keys.length, top = values && answer.signed ? largest(values) || 1 : 1, kind = answer.signed ? "signed" : "weight", scale = { kind, top, dark };
  const map = atlas && atlas.maps.find((each) => each.layer === answer.layer && each.place === answer.place), summary = map && map.heads.find((each) => each.head === answer.head);
  const name = `${layerName(t, answer.place, answer.layer)}, ${t("head")} ${answer.head}`;
  const heads = map ? map.heads.map((each) => [String(each.head), String(each.head)]) : [], layers = atlas ? atlas.maps.map((each) => [`${each.place} ${each.layer}`, layerName(t, each.place, each.layer)]) : [];
  const pick = (r, c, quiet) => go({ query: r, key: c }, !quiet);
  const follow = (path, at) => go({ view: "flow", step: path, cell: at.join(","), ...(at.length === 3 ? { head: at[0] } : {}) }, true);
  return html`<div class="row"><button class="do" onClick=${() => go({ open: false }, true)}>← ${t("back")}</button>
    ${map && html`<${Choice} label=${t("layer")} value=${`${answer.place} ${answer.layer}`} options=${layers} onPick=${(one) => { const [place, layer] = one.split(" "); go({ place, layer: +layer, query: -1, key: -1 }, true); }} /><${Choice} label=${t("head")} value=${String(answer.head)} options=${heads} onPick=${(head) => go({ head: +head, query: -1, key: -1 }, true)} />`}</div>
  <div class="cols"><div><${Panel} headingRef=${title} title=${html`${name}${summary && summary.tag && html` <span class="note">${tagWord(t, summary.tag)}</span>`}`} note=${t("map_help")} busy=${found.busy}
      tools=${html`<${Tools} python=${answer.python} name=${`layer${answer.layer}-head${answer.head}`} table=${values && { rows: answer.queries, columns: answer.keys, values }} svg=${values && values.length < 20000 ? () => heatSvg(answer.queries, answer.keys, values, scale) : null} />`}>
    <div class="row"><${Switch} label=${t("form")} value=${form} options=${[["map", t("map")], ["lines", t("lines")]]} onPick=${putForm} />
      ${!answer.signed && html`<label><input type="checkbox" checked=${bare} onChange=${(event) => putBare(event.target.checked)} /> ${t("hide_first")}</label>`}<span class="grow"></span>
      ${summary && summary.entropy !== null && html`<span class="note">${t("entropy", { x: number(summary.entropy, 3) })} · ${t("mean_distance", { x: number(summary.distance, 3) })}</span>`}</div>
    ${!values ? html`<p class="note">${t("offline")}</p>` : form === "map" ? html`<${HeatMap} values=${values} rows=${answer.queries} columns=${answer.keys} scale=${scale} selected=${[query, key]} onSelect=${pick} hidden=${(n) => values[n] === 0} label=${name} />` : html`<${Lines} values=${values} rows=${answer.queries} columns=${answer.keys} query=${query} onPick=${(r) => go({ query: r, key: -1 })} />`}
    <${Legend} kind=${kind} low=${answer.signed ? number(-top, 3) : "0"} high=${number(top, 3)} /><p class="note">${t("not_explanation")}</p></${Panel}>
    ${other && html`<${Compare} wanted=${wanted} />`}
    ${!answer.signed && html`<${WhatIf} answer=${answer} query=${query} />`}</div>
  <div><section class="panel" data-part="explanation"><${Explanation} path=${answer.path} index=${[answer.head, query, key]} onGo=${follow} /></section>
    <${Panel} part="reading" title=${t("reads", { q: visible(answer.queries[query]) })}>${values && html`<${TopKeys} values=${values.subarray(query * columns, (query + 1) * columns)} keys=${answer.keys} onPick=${(c) => go({ query, key: c })} />`}</${Panel}></div></div>`;
}

function TopKeys({ values, keys, onPick, count = 10 }) {
  const order = Array.from(values, (value, n) => [value, n]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, count).filter(([value]) => value !== 0);
  const top = Math.max(...order.map(([value]) => Math.abs(value)), 1e-9);
  return html`<ul class="bars weights">${order.map(([value, n]) => html`<li key=${n}>${onPick ? html`<button onClick=${() => onPick(n)}>${visible(keys[n])} <small>${n}</small></button>` : html`<span class="name">${visible(keys[n])} <small>${n}</small></span>`}<span class="track" aria-hidden="true"><b style=${{ width: (100 * Math.abs(value)) / top + "%" }}></b></span><span class="num">${number(value)}</span></li>`)}</ul>`;
}

// Tokens on both sides, a line for each weight that matters; for long texts only those of the selected query.
function Lines({ values, rows, columns, query, onPick }) {
  const { t } = useStudio(), high = 22, width = 560, count = columns.length, lines = [];
  for (let r = 0; r < rows.length; r++) for (let c = 0; c < count; c++) {
    const w = Math.abs(values[r * count + c]);
    if (w > 0.04 && (rows.length <= 40 || r === query)) lines.push(html`<line key=${`${r},${c}`} x1="180" x2=${width - 180} y1=${r * high + 16} y2=${c * high + 16} stroke="var(--accent)" stroke-width=${0.6 + 3.4 * w} stroke-opacity=${r === query ? 0.3 + 0.7 * w : 0.1 + 0.2 * w} />`);
  }
  const side = (names, x, anchor, on, pick) => names.map((name, n) => html`<text key=${n} x=${x} y=${n * high + 20} text-anchor=${anchor} class=${n === on ? "on" : ""} onClick=${pick && (() => pick(n))}>${visible(name)}</text>`);
  return html`<div class="scroll linesbox" tabindex="0" role="group" aria-label=${t("lines")}><svg width=${width} height=${Math.max(rows.length, count) * high + 10} viewBox=${`0 0 ${width} ${Math.max(rows.length, count) * high + 10}`}>${lines}${side(rows, 172, "end", query, onPick)}${side(columns, width - 172, "start", -1)}</svg></div>`;
}

function whatIfCode(answer, query, heat, factor, masked) {
  const scores = answer.path.replace(/weights$/, "scores"), at = `[0, ${answer.head}, ${query}]`;
  return `${answer.opening}
taps = clearhead.Taps(read=["${scores}", "${answer.path}"])
inspection.model_input.run(taps)
scores = taps.values["${scores}"]${at} * ${factor} / ${heat}
${masked ? `scores = scores.masked_fill(taps.values["${answer.path}"]${at} == 0, -torch.inf)\n` : ""}print(scores.softmax(-1))`;
}

// The selected query's weights from its scores, with another temperature, without the scale, or without the mask.
function WhatIf({ answer, query }) {
  const { t, args } = useStudio(), [heat, putHeat] = useState(1), [scaled, putScaled] = useState(true), [masked, putMasked] = useState(true);
  const found = useAnswer("step", { ...args, path: answer.path.replace(/weights$/, "scores"), head: answer.head }), scores = found.answer;
  const width = useAnswer("step", { ...args, path: answer.path.replace(/weights$/, "query"), head: answer.head }).answer;
  if (!scores || !width || scores.values.shape[1] !== answer.keys.length || !answer.weights) return null;
  const columns = answer.keys.length, root = Math.sqrt(width.columns);
  const row = (array) => Array.from(array.values.subarray(query * columns, (query + 1) * columns));
  const allowed = row(answer.weights).map((w) => !masked || w > 0);
  const logits = row(scores.values).map((s, n) => (allowed[n] ? (s * (scaled ? 1 : root)) / heat : -Infinity)), top = Math.max(...logits);
  const powers = logits.map((s) => Math.exp(s - top)), sum = powers.reduce((a, b) => a + b, 0), weights = Float32Array.from(powers, (p) => p / sum);
  const entropy = -weights.reduce((total, w) => total + (w > 0 ? w * Math.log2(w) : 0), 0);
  return html`<${Panel} title=${t("what_if", { q: visible(answer.queries[query]) })} note=${t("what_if_help")} part="whatif" tools=${html`<${Tools} python=${whatIfCode(answer, query, heat, scaled ? 1 : root, masked)} name="whatif" table=${{ rows: answer.keys, columns: ["weight"], values: weights }} />`}><div class="sliders"><${Slider} label=${t("temperature")} low=${0.1} high=${4} step=${0.1} value=${heat} onMove=${putHeat} /></div>
    <div class="row"><label><input type="checkbox" checked=${scaled} onChange=${(event) => putScaled(event.target.checked)} /> ${t("divide_root", { n: width.columns })}</label><label><input type="checkbox" checked=${masked} onChange=${(event) => putMasked(event.target.checked)} /> ${t("apply_mask")}</label><span class="grow"></span><span class="note">${t("entropy", { x: number(entropy, 3) })} · ${t("largest_weight", { x: percent(Math.max(...weights)) })}</span></div>
    <${TopKeys} values=${weights} keys=${answer.keys} count=${8} /></${Panel}>`;
}

// The same head of the second model or text, and the difference.
function Compare({ wanted }) {
  const { t, other, dark } = useStudio();
  const found = useAnswer("compare", { ...wanted, other_text: other.text, other_model: other.model }), answer = found.answer;
  if (!answer) return html`<${Status} state=${found} />`;
  const maps = [["first", answer.first, answer.labels[0], "weight"], ["second", answer.second, answer.labels[1], "weight"], ...(answer.difference ? [["difference", answer.difference, answer.labels[0], "signed"]] : [])];
  return html`<${Panel} title=${t("compare")} part="compare" note=${answer.difference ? "" : t("sizes_differ")} tools=${html`<${Tools} python=${answer.python} />`}><div class="pair">${maps.map(([name, array, labels, kind]) => {
    const top = kind === "signed" ? largest(array.values) || 1e-6 : 1;
    return html`<div key=${name}><h3>${t(name)}</h3><${HeatMap} values=${array.values} rows=${labels[0]} columns=${labels[1]} scale=${{ kind, top, dark }} label=${t(name)} hidden=${(n) => kind === "weight" && array.values[n] === 0} limit=${18} /><${Legend} kind=${kind} low=${kind === "signed" ? number(-top, 3) : "0"} high=${number(top, 3)} /></div>`;
  })}</div></${Panel}>`;
}
