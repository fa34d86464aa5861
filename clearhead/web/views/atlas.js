import { html, useState, useMemo, useEffect, useRef, useStudio, useAnswer, number, percent, visible, css } from "../ui.js";
import { Explanation, HeatMap, Legend, Status, Thumbnail, Tools, csvOf, svgOf, tagWord } from "../parts.js";

const TAGS = ["previous token", "first-token sink", "induction", "diagonal", "uniform", ""];

export function Atlas() {
  const { state } = useStudio();
  return state.open ? html`<${HeadView} />` : html`<${AllHeads} />`;
}

function AllHeads() {
  const { t, go, state, args } = useStudio();
  const found = useAnswer("atlas", args), answer = found.answer;
  const [sort, putSort] = useState("layer"), [only, putOnly] = useState("all");
  if (!answer) return html`<${Status} state=${found} />`;
  const all = answer.maps.flatMap((map) => map.heads.map((head, at) => ({ map, head, at })));
  const shown = all.filter(({ head }) => only === "all" || head.tag === only);
  if (sort === "tag") shown.sort((a, b) => TAGS.indexOf(a.head.tag) - TAGS.indexOf(b.head.tag));
  if (sort === "entropy") shown.sort((a, b) => (a.head.entropy || 0) - (b.head.entropy || 0));
  const square = ({ map, head, at }) => {
    const [, rows, columns] = map.thumbnails.shape;
    return html`<button class="thumb" key=${`${map.place}${map.layer}.${head.head}`} data-head=${`${map.place}.${map.layer}.${head.head}`} onClick=${() => go({ open: true, layer: map.layer, place: map.place, head: head.head, query: -1, key: -1 }, true)}>
      <${Thumbnail} values=${map.thumbnails.values.subarray(at * rows * columns, (at + 1) * rows * columns)} rows=${rows} columns=${columns} signed=${map.signed} top=${map.top} />
      <span>${map.place === "stack" ? "" : map.place + " "}${t("layer")} ${map.layer} · ${t("head")} ${head.head}</span><span>${head.tag ? tagWord(t, head.tag) : head.entropy === null ? "" : t("entropy", { x: number(head.entropy, 2) })}</span></button>`;
  };
  return html`<p class="help">${t("atlas_help")}</p><section class="panel"><div class="row"><h2>${t("heads_total", { n: all.length, m: answer.maps.length })}</h2><span class="grow"></span>
    <label>${t("sort")} <select value=${sort} onChange=${(e) => putSort(e.target.value)}>${["layer", "tag", "entropy"].map((name) => html`<option key=${name} value=${name}>${t("sort_" + name)}</option>`)}</select></label>
    <label>${t("filter")} <select value=${only} onChange=${(e) => putOnly(e.target.value)}><option value="all">${t("all")}</option>${TAGS.map((tag) => html`<option key=${tag} value=${tag}>${tagWord(t, tag)} (${all.filter(({ head }) => head.tag === tag).length})</option>`)}</select></label></div>
    ${answer.without_maps.map((line) => html`<p class="note" key=${line}>${line}</p>`)}
    ${sort === "layer" ? html`<div class="atlas">${answer.maps.map((map) => { const own = shown.filter((one) => one.map === map); return own.length > 0 && html`<div class="line" key=${map.place + map.layer}><span class="name">${map.place === "stack" ? "" : map.place + " "}${t("layer")} ${map.layer}</span>${own.map(square)}</div>`; })}</div>` : html`<div class="atlas packed">${shown.map(square)}</div>`}
    <${Legend} kind="weight" low="0" high="1" /><${Tools} python=${answer.python} /></section>`;
}

function HeadView() {
  const { t, go, state, args, source } = useStudio();
  const wanted = { ...args, layer: state.layer, place: state.place || null, head: state.head };
  const found = useAnswer("head", wanted), answer = found.answer;
  const [form, putForm] = useState("map"), [other, putOther] = useState(false);
  const title = useRef(null);
  useEffect(() => { if (title.current) title.current.focus(); }, [answer && answer.layer, answer && answer.head]);
  const strongest = useMemo(() => {
    if (!answer || !answer.weights) return [0, 0];
    const [rows, columns] = answer.weights.shape, values = answer.weights.values;
    let best = -1, at = [rows - 1, 0];
    for (let r = Math.min(2, rows - 1); r < rows; r++) for (let c = 1; c < columns; c++) if (values[r * columns + c] > best && c !== r) { best = values[r * columns + c]; at = [r, c]; }
    return at;
  }, [answer]);
  if (!answer) return html`<${Status} state=${found} />`;
  const query = state.query >= 0 ? Math.min(state.query, answer.queries.length - 1) : strongest[0], key = state.key >= 0 ? Math.min(state.key, answer.keys.length - 1) : strongest[1];
  const columns = answer.keys.length, values = answer.weights && answer.weights.values;
  const top = values && answer.signed ? values.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9) : 1, scale = { signed: answer.signed, top };
  const name = `${answer.place === "stack" ? "" : answer.place + " "}${t("layer")} ${answer.layer}, ${t("head")} ${answer.head}`;
  const pick = (r, c, quiet) => go({ query: r, key: c }, !quiet);
  return html`<p class="crumbs"><button class="do" onClick=${() => go({ open: false }, true)}>← ${t("back")}</button></p>
  <div class="cols"><div><section class="panel"><div class="row"><h2 ref=${title} tabindex="-1">${name}</h2><span class="grow"></span>
      <button class="do" aria-pressed=${form === "map"} onClick=${() => putForm("map")}>${t("map")}</button><button class="do" aria-pressed=${form === "lines"} onClick=${() => putForm("lines")}>${t("lines")}</button>${source.live && html`<button class="do" aria-pressed=${other} onClick=${() => putOther(!other)}>${t("compare")}</button>`}</div>
    <p class="note">${t("map_help")}</p>
    ${!values ? html`<p class="note">${t("offline")}</p>` : form === "map" ? html`<${HeatMap} values=${values} rows=${answer.queries} columns=${answer.keys} scale=${scale} selected=${[query, key]} onSelect=${pick} hidden=${(n) => values[n] === 0} label=${name} />` : html`<${Lines} values=${values} rows=${answer.queries} columns=${answer.keys} query=${query} onPick=${(r) => go({ query: r })} />`}
    <${Legend} kind=${answer.signed ? "signed" : "weight"} low=${answer.signed ? number(-top, 3) : "0"} high=${number(top, 3)} />
    <${Tools} python=${answer.python} name=${`layer${answer.layer}-head${answer.head}`} csv=${values && (() => csvOf(answer.queries, answer.keys, values, columns))} svg=${values && columns * answer.queries.length < 20000 ? () => svgOf(answer.queries, answer.keys, values, scale) : null} /></section>
    ${other && html`<${Compare} wanted=${wanted} />`}</div>
    <div><section class="panel" data-part="reading"><h2>${t("reads", { q: visible(answer.queries[query]) })}</h2>${values && html`<${TopKeys} values=${values.subarray(query * columns, (query + 1) * columns)} keys=${answer.keys} onPick=${(c) => go({ key: c })} />`}</section>
    <section class="panel" data-part="explanation"><${Explanation} path=${answer.path} index=${[answer.head, query, key]} onGo=${(path, at) => go({ view: "flow", step: path, cell: at.join(","), ...(at.length === 3 ? { head: at[0] } : {}) }, true)} /></section></div></div>`;
}

function TopKeys({ values, keys, onPick }) {
  const order = Array.from(values, (value, n) => [value, n]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 12);
  const top = Math.max(...order.map(([value]) => Math.abs(value)), 1e-9);
  return html`<ul class="bars">${order.map(([value, n]) => html`<li key=${n}><button onClick=${() => onPick(n)}>${visible(keys[n])} <small>${n}</small></button><span class="track" aria-hidden="true"><b style=${{ width: (100 * Math.abs(value)) / top + "%" }}></b></span><span class="num">${number(value)}</span></li>`)}</ul>`;
}

// Tokens on both sides, a line for each weight that matters.
function Lines({ values, rows, columns, query, onPick }) {
  const high = 22, width = 560, height = Math.max(rows.length, columns.length) * high + 10, lines = [];
  for (let r = 0; r < rows.length; r++) for (let c = 0; c < columns.length; c++) {
    const w = Math.abs(values[r * columns.length + c]);
    if (w > 0.05 && (rows.length <= 40 || r === query)) lines.push(html`<line key=${`${r},${c}`} x1="190" x2=${width - 190} y1=${r * high + 16} y2=${c * high + 16} stroke="var(--accent)" stroke-width=${0.6 + 3 * w} stroke-opacity=${r === query ? 0.25 + 0.75 * w : 0.18 * w + 0.05} />`);
  }
  return html`<div class="scroll" tabindex="0" role="group"><svg width=${width} height=${height} style=${{ fontSize: "13px" }}>
    ${lines}${rows.map((name, r) => html`<text key=${r} x="182" y=${r * high + 20} text-anchor="end" fill="var(--ink)" font-weight=${r === query ? 700 : 400} style=${{ cursor: "pointer" }} onClick=${() => onPick(r)}>${visible(name)}</text>`)}${columns.map((name, c) => html`<text key=${c} x=${width - 182} y=${c * high + 20} fill="var(--ink)">${visible(name)}</text>`)}</svg></div>`;
}

export function Compare({ wanted }) {
  const { t, state, go, models, args } = useStudio();
  const [text, putText] = useState(state.otherText || args.text), [model, putModel] = useState(state.otherModel || args.model);
  const found = useAnswer("compare", { ...wanted, other_text: state.otherText, other_model: state.otherModel }, Boolean(state.otherText || state.otherModel)), answer = found.answer;
  const maps = answer ? [["first", answer.first, answer.labels[0], false], ["second", answer.second, answer.labels[1], false], ...(answer.difference ? [["difference", answer.difference, answer.labels[0], true]] : [])] : [];
  return html`<section class="panel" data-part="compare"><h2>${t("compare")}</h2><div class="row"><label>${t("other_text")} <input value=${text} onInput=${(e) => putText(e.target.value)} /></label>
    ${models.length > 1 && html`<label>${t("other_model")} <select value=${model} onChange=${(e) => putModel(e.target.value)}>${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}
    <button class="do main" onClick=${() => go({ otherText: text, otherModel: model === args.model ? "" : model })}>${t("compare")}</button></div>
    <${Status} state=${found} />${answer && !answer.difference && html`<p class="note">${t("sizes_differ")}</p>`}
    <div class="pair">${maps.map(([name, array, labels, signed]) => { const top = signed ? Math.max(...array.values.map(Math.abs), 1e-6) : 1; return html`<div key=${name}><h3>${t(name)}</h3><${HeatMap} values=${array.values} rows=${labels[0]} columns=${labels[1]} scale=${{ signed, top }} label=${t(name)} hidden=${(n) => !signed && array.values[n] === 0} cellSize=${Math.max(4, Math.min(18, Math.floor(300 / labels[1].length)))} /><${Legend} kind=${signed ? "signed" : "weight"} low=${signed ? number(-top, 3) : "0"} high=${number(top, 3)} /></div>`; })}</div>
    ${answer && answer.next && html`<div class="pair">${answer.next.map((list, n) => html`<table class="plain" key=${n}><caption>${t(n ? "second" : "first")}</caption><tbody>${list.map(([word, p]) => html`<tr key=${word}><td>${visible(word)}</td><td class="num">${percent(p)}</td></tr>`)}</tbody></table>`)}</div>`}</section>`;
}
