// Curves with axes, a crosshair that reads them, and a legend.
import { html, useRef, useState, useStudio, useWidth } from "../ui.js";
import { clamp, CURVES, DASHES } from "../colours.js";
import { number } from "../format.js";
import { download } from "../arrays.js";

// Round steps: 1, 2 or 5 times a power of ten.
function ticks(low, high, count, least = 0) {
  const rough = Math.max((high - low) / count || 1, least), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power, out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) out.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return out;
}

function powers(low, high) {
  const out = [], every = Math.max(1, Math.ceil((high - low) / 6));
  for (let at = Math.ceil(low); at <= high + 1e-9; at += every) out.push(at);
  return out.length > 1 ? out : [low, high];
}

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";
// 1000 -> 1,000; 1e8 -> 10⁸
function power(value) {
  const exponent = Math.log10(value), whole = Math.abs(exponent - Math.round(exponent)) < 1e-6;
  if (!whole || (exponent < 3.5 && exponent > -3.5)) return number(value, 3);
  return "10" + [...String(Math.round(exponent))].map((c) => (c === "-" ? "⁻" : RAISED[+c])).join("");
}

const LEFT = 58, RIGHT = 14, TOP = 10, BOTTOM = 38;

// curves: [{name, points: [[x, y], …], faint}]
export function Chart({ curves, x, y, log, logX, height = 250, label, at, onPick, name = "chart", zero }) {
  const { t, dark } = useStudio(), svg = useRef(null), box = useRef(null), [seen, put] = useState(null), WIDTH = Math.max(260, useWidth(box, 640));
  const fy = log ? Math.log10 : (v) => v, fx = logX ? Math.log10 : (v) => v;
  const good = ([a, b]) => Number.isFinite(b) && Number.isFinite(a) && (!log || b > 0) && (!logX || a > 0);
  const shown = curves.map((curve) => ({ ...curve, points: curve.points.filter(good) })).filter((curve) => curve.points.length);
  if (!shown.length) return html`<figure class="chart" ref=${box}></figure>`;
  const xs = shown.flatMap((c) => c.points.map((p) => fx(p[0]))), ys = shown.flatMap((c) => c.points.map((p) => fy(p[1])));
  if (zero && !log) ys.push(0);
  const bounds = (list) => list.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const [x0, x1] = bounds(xs), [low, high] = bounds(ys), pad = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1, y0 = zero ? low : low - pad, y1 = high + pad;
  const px = (v) => LEFT + ((fx(v) - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
  const py = (v) => height - BOTTOM - ((fy(v) - y0) / (y1 - y0 || 1)) * (height - BOTTOM - TOP);
  const palette = CURVES[dark ? "dark" : "light"], stroke = (n) => palette[n % 6];
  const nearest = (event) => {
    const area = svg.current.getBoundingClientRect(), wanted = x0 + clamp((((event.clientX - area.left) / area.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT), 0, 1) * (x1 - x0);
    let best = shown[0].points[0][0], gap = Infinity;
    for (const curve of shown) for (const [a] of curve.points) if (Math.abs(fx(a) - wanted) < gap) { gap = Math.abs(fx(a) - wanted); best = a; }
    return best;
  };
  const reading = seen === null ? null : shown.map((curve) => curve.points.find((p) => p[0] === seen));
  const save = () => download(`${name}.svg`, new XMLSerializer().serializeToString(svg.current), "image/svg+xml");
  const down = log ? powers(y0, y1).map((v) => 10 ** v) : ticks(y0, y1, 5), over = logX ? powers(x0, x1).map((v) => 10 ** v) : ticks(x0, x1, 6, xs.every(Number.isInteger) ? 1 : 0);
  return html`<figure class="chart" ref=${box}><svg ref=${svg} xmlns="http://www.w3.org/2000/svg" viewBox=${`0 0 ${WIDTH} ${height}`} role="img" aria-label=${label || `${y} / ${x}`} font-family="sans-serif" font-size="12"
      onPointerMove=${(event) => put(nearest(event))} onPointerLeave=${() => put(null)} onClick=${(event) => onPick && onPick(nearest(event))}>
    ${down.map((v) => html`<g key=${v}><line class="grid" x1=${LEFT} x2=${WIDTH - RIGHT} y1=${py(v)} y2=${py(v)} stroke="#8884" /><text x=${LEFT - 7} y=${py(v) + 4} text-anchor="end" fill="currentColor">${log ? power(v) : number(v, 3)}</text></g>`)}
    ${over.map((v) => html`<text key=${v} x=${px(v)} y=${height - BOTTOM + 16} text-anchor="middle" fill="currentColor">${logX ? power(v) : number(v, 4)}</text>`)}
    <line x1=${LEFT} x2=${WIDTH - RIGHT} y1=${height - BOTTOM} y2=${height - BOTTOM} stroke="currentColor" stroke-opacity=".5" />
    <text x=${(LEFT + WIDTH - RIGHT) / 2} y=${height - 4} text-anchor="middle" fill="currentColor">${x}</text>
    ${shown.map((curve, n) => html`<path key=${curve.name} d=${curve.points.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join("")} fill="none" stroke=${stroke(n)} stroke-dasharray=${DASHES[n % 6]} stroke-width="2" stroke-linejoin="round" stroke-opacity=${curve.faint ? 0.35 : 1} />`)}
    ${shown.map((curve, n) => curve.points.length < 24 && curve.points.map((p, i) => html`<circle key=${`${n}.${i}`} cx=${px(p[0])} cy=${py(p[1])} r="3" fill=${stroke(n)} />`))}
    ${at !== undefined && at >= 0 && html`<line x1=${px(at)} x2=${px(at)} y1=${TOP} y2=${height - BOTTOM} stroke="currentColor" stroke-width="2" stroke-opacity=".55" />`}
    ${seen !== null && html`<line x1=${px(seen)} x2=${px(seen)} y1=${TOP} y2=${height - BOTTOM} stroke="currentColor" stroke-opacity=".35" />`}
    ${reading && reading.map((p, n) => p && html`<circle key=${n} cx=${px(p[0])} cy=${py(p[1])} r="4" fill=${stroke(n)} />`)}
  </svg><figcaption class="legend">${shown.map((curve, n) => html`<span key=${curve.name} class="row"><svg width="28" height="8" aria-hidden="true"><line x1="0" x2="28" y1="4" y2="4" stroke=${stroke(n)} stroke-dasharray=${DASHES[n % 6]} stroke-width="2" /></svg>${curve.name}<b class="num">${reading && reading[n] ? number(reading[n][1]) : ""}</b></span>`)}
    ${seen !== null && html`<span class="num">${x} ${number(seen)}</span>`}<span class="grow"></span><button class="quiet" onClick=${save}>${t("save_svg")}</button></figcaption></figure>`;
}
