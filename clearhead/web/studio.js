// The frame around the views: the address, the text, the model, language and theme.
import { html, Studio, useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback } from "./ui.js";
import { render } from "./preact.js";
import { START, readAddress, writeAddress } from "./address.js";
import { en } from "./words/en.js";
import { zh } from "./words/zh.js";
import { translate } from "./words/phrases.js";
import { Prompt } from "./parts/prompt.js";
import { Write } from "./views/write.js";
import { Flow } from "./views/flow.js";
import { Atlas } from "./views/atlas.js";
import { Lens } from "./views/lens.js";
import { Intervene } from "./views/intervene.js";
import { Train } from "./views/train.js";
import { Lab } from "./views/lab.js";
import { Check, Report } from "./views/check.js";
import { Build } from "./views/build.js";
import { Tour } from "./views/tour.js";

const LANGUAGES = { en, zh };
const VIEWS = { write: Write, flow: Flow, atlas: Atlas, lens: Lens, intervene: Intervene, train: Train, lab: Lab, check: Check, build: Build, report: Report };
const LIVE_ONLY = new Set(["intervene", "train", "lab", "check", "build"]), ALONE = new Set(["report"]); // the verdict is a widget of its own
const TEXTLESS = new Set(["train", "lab", "check", "build", "report"]);

// The selection, and `go` which changes it: a big change is a new entry of the browser's history, a small one is not.
function useSelection(options) {
  const own = options.address === false;
  const [state, put] = useState(() => ({ ...START, ...(options.state || {}), ...(own || !location.hash ? {} : readAddress(location.hash)) }));
  const go = useCallback((change, push) => put((old) => {
    const next = { ...old, ...change };
    if (!own) history[push ? "pushState" : "replaceState"](null, "", location.pathname + location.search + writeAddress(next));
    return next;
  }), []);
  useEffect(() => {
    if (own) return undefined;
    const back = () => put(readAddress(location.hash));
    addEventListener("popstate", back);
    return () => removeEventListener("popstate", back);
  }, []);
  return [state, go];
}

function chooseLanguage(state, options) {
  const asked = new URLSearchParams(location.search).get("lang");
  const found = [state.lang, asked, options.lang].find((name) => LANGUAGES[name]);
  return found || ((navigator.language || "").startsWith("zh") ? "zh" : "en");
}

function App({ source, first, options }) {
  const [info, putInfo] = useState(first), refresh = useCallback(() => source.ask("models", {}).then(putInfo), []);
  const own = options.address === false, [state, go] = useSelection(options);
  const [error, putError] = useState(""), [spoken, say] = useState(""), main = useRef(null);
  const language = chooseLanguage(state, options);
  const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const t = useCallback((key, values = {}) => {
    const word = LANGUAGES[language][key];
    if (word === undefined) console.error(`no word for ${key} in ${language}`);
    return (word === undefined ? key : word).replace(/\{(\w+)\}/g, (_, name) => (values[name] === undefined ? "" : values[name]));
  }, [language]);
  const tr = useCallback((text) => translate(language, text), [language]);
  const has = useCallback((key) => LANGUAGES[language][key] !== undefined, [language]);
  const model = info.models.includes(state.model) ? state.model : info.models[0], text = state.text === null ? info.text : state.text;
  const args = useMemo(() => ({ model, text }), [model, text]);
  const setText = useCallback((value) => go({ text: value, query: -1, key: -1, cell: "" }, true), []);
  const fail = useCallback((problem) => putError(String(problem.message || problem)), []);
  useEffect(() => { document.documentElement.lang = language === "zh" ? "zh-CN" : "en"; }, [language]);
  const views = options.views || Object.keys(VIEWS).filter((name) => !ALONE.has(name) && (source.live || !LIVE_ONLY.has(name)));
  const view = views.includes(state.view) ? state.view : views[0], View = VIEWS[view], alone = views.length === 1;
  useLayoutEffect(() => { if (!own) document.title = `${t(view)} · ${model || ""} · Clearhead`; }, [view, model, language]);
  const other = { model: info.models.includes(state.otherModel) ? state.otherModel : model, text: state.otherText || text };
  const comparing = state.compare && source.live && (other.model !== model || other.text !== text);
  const shared = { state, go, t, tr, has, args, other: comparing ? other : null, source, fail, say, dark, language, models: info.models, info, refresh, setText };
  const open = (name) => {
    putError("");
    go({ view: name, open: false }, true);
    if (main.current) main.current.focus({ preventScroll: true });
    if (!own) scrollTo(0, 0);
  };
  const tab = (name) => html`<li key=${name}><button data-view=${name} aria-current=${name === view ? "page" : undefined} title=${t("about_" + name)} onClick=${() => open(name)}>${t(name)}</button></li>`;
  return html`<${Studio.Provider} value=${shared}><div class=${"studio" + (own ? " embedded" : "")} data-theme=${dark ? "dark" : "light"} lang=${language === "zh" ? "zh-CN" : "en"}>
    <a class="skip" href="#view" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>${t("skip")}</a>
    <header class="bar"><h1 class="brand"><span aria-hidden="true"></span>Clearhead</h1>
      ${!alone && html`<nav aria-label=${t("views")}><ul class="tabs">${views.map(tab)}</ul></nav>`}<span class="grow"></span>
      <div class="row tight">${views.includes("flow") && views.includes("write") && html`<button class="do" data-act="tour" aria-pressed=${state.tour > 0} onClick=${() => go(state.tour ? { tour: 0 } : { tour: 1, view: "write" }, true)}>${t("tour")}</button>`}
      <button class="do" data-act="lang" lang=${language === "en" ? "zh-CN" : "en"} onClick=${() => go({ lang: language === "en" ? "zh" : "en" })}>${t("language")}</button>
      <button class="do" aria-label=${t("theme")} title=${t("theme")} data-act="theme" onClick=${() => go({ theme: dark ? "light" : "dark" })}>◐</button></div></header>
    ${!TEXTLESS.has(view) && html`<${Prompt} />`}
    <main id="view" tabindex="-1" ref=${main} data-view=${view}>
      ${error && html`<p class="error" role="alert">${tr(error)} <button class="quiet" aria-label=${t("close")} onClick=${() => putError("")}>×</button></p>`}
      <${Tour} /><p class="help">${t(view + "_help")}</p><${View} key=${view} />
      ${(info.notes || []).map((note) => html`<p class="note" key=${note}>${tr(note)}</p>`)}</main>
    <div class="live" aria-live="polite">${spoken}</div></div></${Studio.Provider}>`;
}

export async function start(root, source, options = {}) {
  const first = await source.ask("models", {});
  render(html`<${App} source=${source} first=${first} options=${options} />`, root);
}
