// The frame around the views: the address, the text, the model, language and theme.
import { html, render, Studio, LANGUAGES, START, useState, useEffect, useMemo, useRef, useCallback, readAddress, writeAddress, useAnswer } from "./ui.js";
import { Write } from "./views/write.js";
import { Flow } from "./views/flow.js";
import { Atlas } from "./views/atlas.js";
import { Lens } from "./views/lens.js";
import { Intervene } from "./views/intervene.js";
import { Train } from "./views/train.js";
import { Lab } from "./views/lab.js";
import { Check } from "./views/check.js";
import { Build } from "./views/build.js";
import { Tour } from "./views/tour.js";

const VIEWS = { write: Write, flow: Flow, atlas: Atlas, lens: Lens, intervene: Intervene, train: Train, lab: Lab, check: Check, build: Build };
const LIVE_ONLY = new Set(["intervene", "train", "lab", "check", "build"]);
const TEXTLESS = new Set(["lab", "check", "build"]);

function App({ source, info, options }) {
  const own = options.address === false;
  const [state, put] = useState(() => ({ ...START, ...(own ? {} : readAddress(location.hash)), ...(options.state || {}) }));
  const [error, putError] = useState(""), [spoken, say] = useState("");
  const main = useRef(null), typing = useRef(0);
  const go = useCallback((change, push) => put((old) => {
    const next = { ...old, ...change };
    if (!own) {
      const address = location.pathname + location.search + writeAddress(next);
      if (push) history.pushState(null, "", address); else history.replaceState(null, "", address);
    }
    return next;
  }), []);
  useEffect(() => {
    if (own) return undefined;
    const back = () => put(readAddress(location.hash));
    addEventListener("popstate", back);
    return () => removeEventListener("popstate", back);
  }, []);
  const asked = new URLSearchParams(location.search).get("lang");
  const language = LANGUAGES[state.lang] ? state.lang : LANGUAGES[asked] ? asked : LANGUAGES[options.lang] ? options.lang : (navigator.language || "").startsWith("zh") ? "zh" : "en";
  const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const t = useCallback((key, values = {}) => {
    const word = LANGUAGES[language][key];
    if (word === undefined) console.error(`no word for ${key} in ${language}`);
    return (word === undefined ? key : word).replace(/\{(\w+)\}/g, (_, name) => (values[name] === undefined ? "" : values[name]));
  }, [language]);
  const model = info.models.includes(state.model) ? state.model : info.models[0], text = state.text === null ? info.text : state.text;
  const [draft, putDraft] = useState(text);
  useEffect(() => putDraft(text), [text]);
  const setText = (value) => go({ text: value, query: -1, key: -1, cell: "" }, true);
  const edit = (value) => { putDraft(value); clearTimeout(typing.current); typing.current = setTimeout(() => setText(value), 220); };
  const args = useMemo(() => ({ model, text }), [model, text]);
  const fail = useCallback((problem) => { putError(String(problem.message || problem)); }, []);
  useEffect(() => { document.documentElement.lang = language === "zh" ? "zh-CN" : "en"; }, [language]);
  const views = options.views || (source.live ? Object.keys(VIEWS).filter((name) => name !== "train" || info.runs) : Object.keys(VIEWS).filter((name) => !LIVE_ONLY.has(name)));
  const view = views.includes(state.view) ? state.view : views[0], View = VIEWS[view];
  const shared = { state, go, t, args, source, fail, say, dark, language, models: info.models, info, setText };
  const open = (name) => { go({ view: name, open: name === "atlas" ? false : state.open }, true); putError(""); if (main.current) { main.current.focus({ preventScroll: true }); scrollTo(0, 0); } };
  const alone = views.length === 1;
  return html`<${Studio.Provider} value=${shared}><div class=${"studio" + (own ? " embedded" : "")} data-theme=${dark ? "dark" : "light"} lang=${language === "zh" ? "zh-CN" : "en"}>
    <a class="skip" href="#view" onClick=${(e) => { e.preventDefault(); main.current.focus(); }}>${t("skip")}</a>
    <header class="bar"><h1 class="brand">Clearhead</h1>${!alone && html`<nav aria-label=${t("views")}><ul class="tabs">${views.map((name) => html`<li key=${name}><button data-view=${name} aria-current=${name === view ? "page" : undefined} onClick=${() => open(name)}>${t(name)}</button></li>`)}</ul></nav>`}
      <span class="grow"></span>${views.includes("flow") && views.includes("write") && html`<button class="do" onClick=${() => go({ tour: state.tour ? 0 : 1, view: "write" }, true)}>${t("tour")}</button>`}<button class="do" data-act="lang" onClick=${() => go({ lang: language === "en" ? "zh" : "en" })}>${t("language")}</button><button class="do" aria-label=${t("theme")} title=${t("theme")} data-act="theme" onClick=${() => go({ theme: dark ? "light" : "dark" })}>◐</button></header>
    ${!TEXTLESS.has(view) && html`<section class="prompt" aria-label=${t("text")}>${info.models.length > 1 ? html`<label>${t("model")} <select value=${model} onChange=${(e) => go({ model: e.target.value, cell: "", step: "", open: false, layer: 0, head: 0, changes: "" }, true)}>${info.models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>` : html`<span class="note">${model}</span>`}
      <label class="text"><span>${t("text")}</span><textarea rows="1" data-act="text" readonly=${!source.live} value=${draft} onInput=${(e) => edit(e.target.value)}></textarea></label></section>`}
    <main id="view" tabindex="-1" ref=${main} data-view=${view}>${error && html`<p class="error" role="alert">${error} <button class="do" onClick=${() => putError("")}>×</button></p>`}<${Tour} /><${View} key=${view} />${info.notes && info.notes.map((note) => html`<p class="note" key=${note}>${note}</p>`)}</main>
    <div class="live" aria-live="polite">${spoken}</div></div></${Studio.Provider}>`;
}

export async function start(root, source, options = {}) {
  const info = await source.ask("models", {});
  render(html`<${App} source=${source} info=${info} options=${options} />`, root);
}
