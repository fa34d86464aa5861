// What the model would say if it stopped at a layer; one token by layer; what each part adds to a logit.
import { html, useState, useEffect, useMemo, useRef, useStudio, useAnswer, useWidth, streamName } from "../ui.js";
import { css, ink, largest } from "../colours.js";
import { number, percent, visible } from "../format.js";
import { Legend, Panel, Status, Switch, Tools } from "../parts/panel.js";
import { Chart } from "../parts/chart.js";
import { HeatMap } from "../parts/heatmap.js";
import { SignedBars } from "../parts/bars.js";

const CELL = 57, NAMES = 96; // pixels of a word, and of the names of the layers

export function Lens() {
  const { t, go, state, args, other, source, dark } = useStudio();
  const { answer: tokens, fresh } = useAnswer("tokens", args), count = tokens ? tokens.labels.length : 0;
  const row = tokens ? (state.query >= 0 && state.query < count ? state.query : count - 1) : -1;
  const box = useRef(null), room = useWidth(box, 900), fits = Math.max(4, Math.min(32, Math.floor((room - NAMES) / CELL)));
  const from = Math.max(0, Math.min(count - fits, row - Math.floor(fits / 2))), range = source.live ? { from, count: fits } : {};
  const found = useAnswer("lens", { ...args, token: state.token, top: 3, ...range }, fresh && Boolean(tokens.predicts)), answer = found.answer;
  const theirs = useAnswer("tokens", other, Boolean(other)), both = Boolean(theirs.fresh && theirs.answer && theirs.answer.predicts);
  const second = useAnswer("lens", { ...other, token: state.token, top: 3, ...range }, Boolean(other) && both && fresh && Boolean(tokens.predicts)).answer;
  if (fresh && !tokens.predicts) return html`<p class="note">${t("no_predictions")}</p>`;
  if (!answer) return html`<div class="cols"><div ref=${box}><${Status} state=${found} /></div><div></div></div>`;
  const at = Math.max(0, answer.positions.indexOf(row)), columns = answer.labels.length;
  const probabilities = answer.top.flatMap((line) => line.map((best) => best[0][2]));
  return html`<div class="cols"><div ref=${box}>
    <${Panel} title=${t("lens_title")} busy=${found.busy} part="lens" tools=${html`<${Tools} python=${answer.python} name="lens" table=${{ rows: answer.layers, columns: answer.labels, values: probabilities }} svg=${() => lensSvg(answer, dark)} />`}>
      ${count > columns && html`<label class="slider"><span>${t("position")}</span><input type="range" min="0" max=${count - 1} value=${row} onInput=${(event) => go({ query: +event.target.value })} /><span class="num">${row + 1} / ${count}</span></label>`}
      <${Grid} answer=${answer} at=${at} />
      <${Legend} kind="probability" />
    </${Panel}>
    ${second && html`<${Panel} title=${`${t("second")}: ${other.model}`} part="lens-second"><${Grid} answer=${second} at=${at} /><${Legend} kind="probability" /></${Panel}>`}
    <${Norms} answer=${answer} at=${at} /></div>
  <div><${Track} answer=${answer} second=${second} at=${at} /><${Attribution} row=${answer.positions[at]} ready=${found.fresh && tokens.predicts !== "class"} /></div></div>`;
}

function Grid({ answer, at }) {
  const { t, go, dark } = useStudio(), scale = { kind: "probability", top: 1, dark };
  const cell = (layer, best, c) => html`<td key=${c} class=${c === at ? "on" : ""}><button style=${{ background: css(best[0][2], scale), color: ink(best[0][2], scale) }} title=${best.map(([word, , p]) => `${visible(word)}  ${percent(p)}`).join("\n")}
    aria-label=${`${streamName(t, layer)}, ${visible(answer.labels[c])}: ${visible(best[0][0])} ${percent(best[0][2])}`} onClick=${() => go({ query: answer.positions[c], token: best[0][0] })}>${visible(best[0][0])}</button></td>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label=${t("lens_title")}><table class="lens"><thead><tr><th scope="col">${t("read_after")}</th>${answer.labels.map((label, c) => html`<th scope="col" key=${c} class=${c === at ? "on" : ""}>${visible(label)}</th>`)}</tr></thead>
    <tbody>${answer.layers.map((layer, r) => html`<tr key=${layer}><th scope="row">${streamName(t, layer)}</th>${answer.top[r].map((best, c) => cell(layer, best, c))}</tr>`)}</tbody></table></div>`;
}

function lensSvg(answer, dark) {
  const wide = 62, high = 24, left = 96, scale = { kind: "probability", top: 1, dark };
  const plain = (text) => visible(text).replace(/[<>&"]/g, (c) => `&#${c.charCodeAt(0)};`), out = [];
  answer.labels.forEach((label, c) => out.push(`<text x="${left + c * wide + wide / 2}" y="16" text-anchor="middle">${plain(label)}</text>`));
  answer.layers.forEach((layer, r) => {
    out.push(`<text x="${left - 8}" y="${40 + r * high}" text-anchor="end">${plain(layer)}</text>`);
    answer.top[r].forEach((best, c) => out.push(`<rect x="${left + c * wide}" y="${24 + r * high}" width="${wide - 2}" height="${high - 2}" rx="3" fill="${css(best[0][2], scale)}"/><text x="${left + c * wide + wide / 2}" y="${40 + r * high}" text-anchor="middle" fill="${ink(best[0][2], scale)}">${plain(best[0][0])}</text>`));
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${left + answer.labels.length * wide}" height="${30 + answer.layers.length * high}" font-family="sans-serif" font-size="11" fill="#555">${out.join("")}</svg>`;
}

function Norms({ answer, at }) {
  const { t, go, dark } = useStudio(), top = largest(answer.norms.values);
  const rows = useMemo(() => answer.layers.map((layer) => streamName(t, layer)), [answer, t]);
  return html`<${Panel} title=${t("norms")} note=${t("norms_help")} part="norms" tools=${html`<${Tools} python=${answer.norms_python} name="norms" table=${{ rows, columns: answer.labels, values: answer.norms.values }} />`}>
    <${HeatMap} values=${answer.norms.values} rows=${rows} columns=${answer.labels} scale=${{ kind: "magnitude", top, dark }} label=${t("norms")} height=${22} limit=${CELL} selected=${[answer.layers.length - 1, at]} onSelect=${(_, c) => go({ query: answer.positions[c] })} /><${Legend} kind="magnitude" high=${number(top, 3)} /></${Panel}>`;
}

// Rank and probability of one token by layer.
function Track({ answer, second, at }) {
  const { t, go, state } = useStudio(), [typed, put] = useState(state.token), [what, putWhat] = useState("chances"), columns = answer.labels.length;
  useEffect(() => put(state.token), [state.token]);
  const curve = (from, name) => ({ name, points: from.layers.map((_, r) => [r, from[what].values[r * from.labels.length + Math.min(at, from.labels.length - 1)]]) });
  const word = answer.token && visible(answer.token[0]);
  return html`<${Panel} title=${t("track")} part="track" tools=${answer.token && html`<${Tools} python=${answer.track_python} name="track" table=${{ rows: answer.layers, columns: answer.labels, values: answer[what].values }} />`}><form class="row" onSubmit=${(event) => { event.preventDefault(); go({ token: typed }); }}><label>${t("token")} <input value=${typed} onInput=${(event) => put(event.target.value)} /></label><button class="do">${t("apply")}</button></form>
    ${!answer.token ? html`<p class="note">${t("track_help")}</p>` : html`<div class="row"><${Switch} label=${t("track")} value=${what} options=${[["chances", t("probability")], ["ranks", t("rank_word")]]} onPick=${putWhat} /></div>
      <${Chart} log=${what === "ranks"} zero=${what !== "ranks"} x=${t("layers_axis")} y=${t(what === "ranks" ? "rank_word" : "probability")} height=${190} curves=${[curve(answer, `${word}`), ...(second && second.token ? [curve(second, `${word} · ${t("second")}`)] : [])]} />
      <table class="plain"><thead><tr><th scope="col">${t("read_after")}</th><th scope="col" class="num">${t("rank_word")}</th><th scope="col" class="num">${t("probability")}</th></tr></thead><tbody>${answer.layers.map((layer, r) => html`<tr key=${layer}><th scope="row">${streamName(t, layer)}</th><td class="num">${answer.ranks.values[r * columns + at].toLocaleString("en")}</td><td class="num">${percent(answer.chances.values[r * columns + at])}</td></tr>`)}</tbody></table>`}</${Panel}>`;
}

function Attribution({ row, ready }) {
  const { t, args, state } = useStudio();
  const { answer } = useAnswer("attribution", { ...args, row, token: state.token }, ready);
  if (!answer) return null;
  const name = (term) => `${term.part ? t("layer") + " " + term.layer.replace("layer ", "") + " " + t(term.part) : t("embedding")}`;
  const items = [...answer.terms.map((term) => ({ name: name(term), value: term.value })), { name: t("offset"), value: answer.offset }];
  return html`<${Panel} part="attribution" title=${t("attribution", { t: visible(answer.token[0]) })} note=${t("attribution_help")} tools=${html`<${Tools} python=${answer.python} name="attribution" table=${{ rows: items.map((item) => item.name), columns: ["logit"], values: items.map((item) => item.value) }} />`}>
    <${SignedBars} items=${items} /><p class="num">${t("sum")} ${number(answer.sum, 6)} · ${t("logit")} ${number(answer.logit, 6)}${answer.softcap ? ` · ${t("before_cap", { x: answer.softcap })}` : ""}</p></${Panel}>`;
}
