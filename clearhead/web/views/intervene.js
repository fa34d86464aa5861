import { html, useState, useRef, useStudio, useAnswer, number, percent, visible } from "../ui.js";
import { HeatMap, Legend, Status, Tools } from "../parts.js";

const read = (text) => { try { const out = JSON.parse(text || "[]"); return Array.isArray(out) ? out : []; } catch { return []; } };
const same = (a, b) => a.kind === b.kind && a.layer === b.layer && a.place === b.place && a.head === b.head && a.part === b.part && a.position === b.position;

export function Intervene() {
  const { t, go, state, args, source, fail } = useStudio();
  const heads = useAnswer("atlas", args), model = useAnswer("model", { model: args.model }), tokens = useAnswer("tokens", args);
  const changes = read(state.changes), [past, putPast] = useState([]), [how, putHow] = useState({ do: "zero", by: 2 }), [other, putOther] = useState({ text: "", layer: 0, position: 0 });
  const row = tokens.answer ? (state.query >= 0 && state.query < tokens.answer.labels.length ? state.query : tokens.answer.labels.length - 1) : -1;
  const result = useAnswer("intervene", { ...args, row, changes }, row >= 0), [effects, putEffects] = useState(null), running = useRef(0);
  const set = (next) => { putPast([...past, state.changes]); go({ changes: next.length ? JSON.stringify(next) : "" }, true); };
  const toggle = (change) => { const found = changes.findIndex((one) => same(one, change)); set(found >= 0 ? changes.filter((_, n) => n !== found) : [...changes, { ...change, ...how }]); };
  const undo = () => { go({ changes: past[past.length - 1] || "" }); putPast(past.slice(0, -1)); };
  const measure = async () => {
    const own = ++running.current, maps = heads.answer.maps, values = new Map();
    for (const map of maps) {
      if (own !== running.current) return;
      try { const found = await source.ask("ablate", { ...args, row, layer: map.layer, place: map.place, token: state.token }); values.set(map, found); } catch (error) { fail(error); return; }
      if (own === running.current) putEffects({ done: values.size === maps.length, values: new Map(values) });
    }
  };
  if (!heads.answer || !tokens.answer || !model.answer) return html`<${Status} state=${heads.error ? heads : tokens} />`;
  const maps = heads.answer.maps, answer = result.answer, most = Math.max(...maps.map((map) => map.heads.length), 1);
  const rows = effects ? maps.filter((map) => effects.values.has(map)) : [];
  const flat = Float32Array.from(rows.flatMap((map) => { const found = effects.values.get(map).effects.values; return Array.from({ length: most }, (_, n) => (n < found.length ? found[n] : 0)); }));
  const top = flat.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-6);
  const branches = [...new Set(maps.map((map) => map.layer))];
  return html`<p class="help">${t("intervene_help")}</p><div class="cols"><div><section class="panel"><div class="row"><label>${t("action")} <select value=${how.do} onChange=${(e) => putHow({ ...how, do: e.target.value })}>${["zero", "mean", "scale"].map((name) => html`<option key=${name} value=${name}>${t(name)}</option>`)}</select></label>${how.do === "scale" && html`<label>${t("by")} <input type="number" step="0.1" value=${how.by} onInput=${(e) => putHow({ ...how, by: +e.target.value })} /></label>`}
      <span class="grow"></span><button class="do" disabled=${!past.length} onClick=${undo}>${t("undo")}</button><button class="do" disabled=${!changes.length} onClick=${() => set([])}>${t("clear")}</button></div>
    ${maps.map((map) => html`<div class="chips" key=${map.place + map.layer}><span class="note" style=${{ width: "86px" }}>${map.place === "stack" ? "" : map.place + " "}${t("layer")} ${map.layer}</span>${map.heads.map((head) => { const change = { kind: "head", place: map.place, layer: map.layer, head: head.head }; return html`<button class="chip" key=${head.head} aria-pressed=${changes.some((one) => same(one, change))} aria-label=${`${t("layer")} ${map.layer} ${t("head")} ${head.head}`} onClick=${() => toggle(change)}>${head.head}</button>`; })}
      ${["mixer", "ffn"].map((part) => { const change = { kind: "branch", place: map.place === "cross" ? "decoder" : map.place, layer: map.layer, part }; return html`<button class="chip" key=${part} aria-pressed=${changes.some((one) => same(one, change))} onClick=${() => toggle(change)}>${t(part)}</button>`; })}</div>`)}
    <h2>${t("patch")}</h2><div class="row"><label>${t("text")} <input value=${other.text} onInput=${(e) => putOther({ ...other, text: e.target.value })} /></label><label>${t("layer")} <input type="number" min="0" max=${model.answer.layers - 1} value=${other.layer} onInput=${(e) => putOther({ ...other, layer: +e.target.value })} /></label><label>${t("position")} <select value=${other.position} onChange=${(e) => putOther({ ...other, position: +e.target.value })}>${tokens.answer.labels.map((label, n) => html`<option key=${n} value=${n}>${n} ${visible(label)}</option>`)}</select></label><button class="do" disabled=${!other.text} onClick=${() => set([...changes, { kind: "patch", place: maps.length ? (maps[0].place === "encoder" ? "decoder" : maps[0].place) : "stack", ...other }])}>${t("add")}</button></div>
    <h2>${t("changes")}</h2>${changes.length ? html`<ul>${changes.map((one, n) => html`<li key=${n}><code>${JSON.stringify(one)}</code></li>`)}</ul>` : html`<p class="note">${t("no_changes")}</p>`}</section>
    <section class="panel"><div class="row"><h2>${t("ablation", { t: effects && rows.length ? visible(effects.values.get(rows[0]).token[0]) : "…" })}</h2><span class="grow"></span>${effects && !effects.done && running.current > 0 ? html`<button class="do" onClick=${() => { running.current++; putEffects({ ...effects, done: true }); }}>${t("stop")}</button>` : html`<button class="do main" onClick=${measure}>${t("ablate_all")}</button>`}</div>
      ${rows.length > 0 && html`<${HeatMap} values=${flat} rows=${rows.map((map) => `${map.place === "stack" ? "" : map.place + " "}${t("layer")} ${map.layer}`)} columns=${Array.from({ length: most }, (_, n) => String(n))} scale=${{ signed: true, top }} label=${t("ablation", { t: "" })} cellSize=${34} cellHeight=${26} /><${Legend} kind="signed" low=${number(-top, 3)} high=${number(top, 3)} />`}</section></div>
  <div><section class="panel" data-part="effect"><h2>${answer ? answer.heading : ""}</h2><${Status} state=${result} />${answer && html`<table class="plain"><thead><tr><th>${t("token")}</th><th>${t("before")}</th><th>${t("after")}</th></tr></thead><tbody>${merged(answer).map((one) => html`<tr key=${one.id}><td>${visible(one.text)}</td><td class="num">${one.before === undefined ? "–" : percent(one.before)}</td><td class="num" data-after=${one.id} data-value=${one.after}>${one.after === undefined ? "–" : percent(one.after)}</td></tr>`)}</tbody></table><p class="note">${t("divergence", { x: number(answer.divergence, 3) })}</p><${Tools} python=${answer.python} />`}</section></div></div>`;
}

function merged(answer) {
  const out = new Map();
  for (const one of answer.after) out.set(one.id, { id: one.id, text: one.text, after: one.probability });
  for (const one of answer.before) out.set(one.id, { ...(out.get(one.id) || { id: one.id, text: one.text }), before: one.probability });
  return [...out.values()].sort((a, b) => Math.max(b.after || 0, b.before || 0) - Math.max(a.after || 0, a.before || 0)).slice(0, 14);
}
