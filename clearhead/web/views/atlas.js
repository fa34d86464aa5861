// All heads, with tags; sort, filter, compare, and open one.
import { html, useState, useStudio, useAnswer, layerName, tagWord } from "../ui.js";
import { number } from "../format.js";
import { Choice, Legend, Panel, Status, Tools } from "../parts/panel.js";
import { Thumbnail } from "../parts/heatmap.js";
import { headsOf, Picture } from "../parts/heads.js";
import { HeadView } from "./head.js";

const TAGS = ["previous token", "first-token sink", "induction", "diagonal", "uniform", ""];
const ORDERS = { tag: (one) => TAGS.indexOf(one.head.tag), entropy: (one) => one.head.entropy || 0, distance: (one) => -(one.head.distance || 0), change: (one) => -(one.change || 0) };

export function Atlas() {
  const { state } = useStudio();
  return state.open ? html`<${HeadView} />` : html`<${AllHeads} />`;
}

// The difference of two thumbnails of one size, as bytes around 128, and how large it is.
function difference(one, two) {
  if (!two || two.rows !== one.rows || two.columns !== one.columns) return null;
  const values = new Uint8Array(one.shades.length);
  let sum = 0;
  for (let n = 0; n < values.length; n++) {
    const gap = two.shades[n] - one.shades[n];
    sum += Math.abs(gap);
    values[n] = Math.max(0, Math.min(255, 128 + gap));
  }
  return { values, size: sum / values.length / 255 };
}

function AllHeads() {
  const { t, tr, go, args, other } = useStudio();
  const found = useAnswer("atlas", args), second = useAnswer("atlas", other, Boolean(other)), answer = found.answer;
  const [sort, putSort] = useState("layer"), [only, putOnly] = useState("all");
  if (!answer) return html`<${Status} state=${found} />`;
  const theirs = other && second.answer ? new Map(headsOf(second.answer.maps).map((one) => [one.key, one])) : null;
  const all = headsOf(answer.maps).map((one) => { const gap = theirs && difference(one, theirs.get(one.key)); return { ...one, twin: theirs && theirs.get(one.key), gap, change: gap ? gap.size : 0 }; });
  const shown = all.filter(({ head }) => only === "all" || head.tag === only);
  const order = sort === "change" && !theirs ? "layer" : sort;
  if (ORDERS[order]) shown.sort((a, b) => ORDERS[order](a) - ORDERS[order](b));
  const square = (one) => html`<button class="thumb" key=${one.key} data-head=${one.key} onClick=${() => go({ open: true, layer: one.map.layer, place: one.map.place, head: one.head.head, query: -1, key: -1 }, true)}>
    ${theirs ? html`<div class="twins"><${Picture} one=${one} />${one.twin && html`<${Picture} one=${one.twin} />`}${one.gap && html`<${Thumbnail} values=${one.gap.values} rows=${one.rows} columns=${one.columns} signed=${true} />`}</div>` : html`<${Picture} one=${one} />`}
    <span>${layerName(t, one.map.place, one.map.layer)} · ${t("head")} ${one.head.head}</span>
    ${theirs ? html`<span class="tag">${one.gap ? t("changed_by", { x: number(one.gap.size, 2) }) : t("other_size")}</span>` : html`<span class=${one.head.tag ? "tag" : ""}>${one.head.tag ? tagWord(t, one.head.tag) : one.head.entropy === null ? "" : t("entropy", { x: number(one.head.entropy, 2) })}</span>`}</button>`;
  const tags = [["all", t("all")], ...TAGS.map((tag) => [tag, `${tagWord(t, tag)} (${all.filter(({ head }) => head.tag === tag).length})`])];
  const orders = ["layer", "tag", "entropy", "distance", ...(theirs ? ["change"] : [])].map((name) => [name, t("sort_" + name)]);
  const signed = answer.maps.some((map) => map.signed), widest = Math.max(1, ...answer.maps.map((map) => map.heads.length));
  return html`<${Panel} part="heads" title=${t("heads_total", { n: all.length, m: answer.maps.length })} busy=${found.busy || (other && second.busy)} note=${theirs ? t("twins_help") : ""}
      tools=${html`<div class="row"><${Choice} label=${t("sort")} value=${order} options=${orders} onPick=${putSort} /><${Choice} label=${t("filter")} value=${only} options=${tags} onPick=${putOnly} />
        <${Tools} python=${theirs ? `${answer.python}\n\n${second.answer.python}` : answer.python} name="heads" table=${{ rows: all.map((one) => one.key), columns: ["entropy", "distance"], values: all.flatMap((one) => [one.head.entropy ?? NaN, one.head.distance ?? NaN]) }} /></div>`}>
    ${answer.without_maps.map((line) => html`<p class="note" key=${line}>${tr(line)}</p>`)}${other && html`<${Status} state=${second} />`}
    <div class="atlas" data-twins=${Boolean(theirs)} style=${{ "--thumb": `${Math.max(theirs ? 210 : 118, Math.min(theirs ? 300 : 190, Math.floor(860 / widest)))}px` }}>${order === "layer" ? answer.maps.map((map) => { const own = shown.filter((one) => one.map === map); return own.length > 0 && html`<div class="line" key=${map.place + map.layer}><span class="name">${layerName(t, map.place, map.layer)}</span><div class="heads">${own.map(square)}</div></div>`; }) : html`<div class="heads">${shown.map(square)}</div>`}</div>
    <${Legend} kind=${signed ? "signed" : "weight"} />${theirs && html`<${Legend} kind="signed" low="−1" high="1" text=${t("difference")} />`}</${Panel}>`;
}
