// What every view uses: Preact, arrays from answers, colours, and the shared selection.
import { h, html, render, createContext, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useContext } from "./vendor/htm-preact.js";
import { en } from "./words/en.js";
import { zh } from "./words/zh.js";

export { h, html, render, createContext, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useContext };

export const LANGUAGES = { en, zh };
export const Studio = createContext(null);
export const useStudio = () => useContext(Studio);

// ---- arrays

const HALF = (bits) => {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
};

// {dtype, shape, data} -> {shape, values}, in place of every array of an answer
export function decode(value) {
  if (Array.isArray(value)) return value.map(decode);
  if (!value || typeof value !== "object") return value;
  if (value.dtype && typeof value.data === "string") {
    const text = atob(value.data), bytes = new Uint8Array(text.length);
    for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
    const view = { f4: Float32Array, u1: Uint8Array, i4: Int32Array, f2: Uint16Array }[value.dtype];
    const raw = new view(bytes.buffer);
    return { shape: value.shape, values: value.dtype === "f2" ? Float32Array.from(raw, HALF) : raw };
  }
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, decode(item)]));
}

// ---- colours: cividis for weights and probabilities, PuOr for signed values; both are colour-blind safe

const CIVIDIS = ["#00224e", "#002e6a", "#1a386f", "#32436d", "#434e6c", "#535a6d", "#61656f", "#6f7073", "#7d7c78", "#8c8878", "#9b9476", "#aba072", "#bcae6c", "#cdbb63", "#dec958", "#f0d846", "#fee838"];
const PUOR = ["#7f3b08", "#b25706", "#e08214", "#fcb761", "#fee0b6", "#f6f6f7", "#d8daeb", "#b1aad1", "#8073ac", "#532687", "#2d004b"];
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function table(stops) {
  const colours = stops.map(rgb);
  return Array.from({ length: 256 }, (_, n) => {
    const x = (n / 255) * (colours.length - 1), low = Math.min(Math.floor(x), colours.length - 2), part = x - low;
    return colours[low].map((c, i) => Math.round(c + part * (colours[low + 1][i] - c)));
  });
}
const TABLES = { weight: table(CIVIDIS), signed: table(PUOR) };
export const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// share of the scale from 0 to 1: weights by square root, signed values around the middle
export function share(value, scale) {
  if (scale.signed) return clamp(0.5 + value / (2 * (scale.top || 1)), 0, 1);
  return Math.sqrt(clamp(value / (scale.top || 1), 0, 1));
}
export const colour = (value, scale) => TABLES[scale.signed ? "signed" : "weight"][Math.round(255 * share(value, scale))];
export const css = (value, scale) => { const [r, g, b] = colour(value, scale); return `rgb(${r},${g},${b})`; };
export const ink = (value, scale) => { const [r, g, b] = colour(value, scale); return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111" : "#fff"; };
export const gradient = (signed) => `linear-gradient(to right, ${(signed ? PUOR : CIVIDIS).join(",")})`;

// ---- numbers and tokens as text

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-4 ? value.toExponential(2) : Number(value.toPrecision(digits)).toString();
}
export const percent = (value) => (value >= 0.0995 ? (100 * value).toFixed(1) : value >= 0.0001 ? (100 * value).toFixed(2) : "<0.01") + " %";
export const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·"));

// ---- the address: one selection for all views

export const START = { view: "write", layer: 0, place: "", head: 0, query: -1, key: -1, step: "", cell: "", token: "", model: "", text: null, open: false, tour: 0, lang: "", theme: "", otherText: "", otherModel: "", changes: "" };
export function readAddress(hash) {
  const state = { ...START };
  for (const [key, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!(key in START)) continue;
    state[key] = typeof START[key] === "number" ? Number(value) || 0 : typeof START[key] === "boolean" ? value === "true" : value;
  }
  return state;
}
export function writeAddress(state) {
  const out = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) if (key in START && value !== START[key] && value !== null) out.set(key, String(value));
  return "#" + out.toString();
}

// ---- questions

// The answer to a question. An older answer stays on screen while a new one is computed; late answers are dropped.
export function useAnswer(question, args, ready = true) {
  const { source, fail } = useStudio();
  const [state, put] = useState({ answer: null, key: "", busy: false, error: "" });
  const key = ready ? question + JSON.stringify(args) : "";
  const newest = useRef("");
  newest.current = key;
  useEffect(() => {
    if (!key) return undefined;
    let live = true;
    put((old) => ({ ...old, busy: true }));
    source.ask(question, args).then(
      (answer) => live && newest.current === key && put({ answer, key, busy: false, error: "" }),
      (error) => live && newest.current === key && put({ answer: null, key, busy: false, error: String(error.message || error) }),
    );
    return () => { live = false; };
  }, [key, source]);
  return state;
}

export function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
