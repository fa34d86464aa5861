// What every view uses: the shared selection, and answers to questions.
import { html, createContext, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useContext } from "./preact.js";

export { html, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback };

export const Studio = createContext(null);
export const useStudio = () => useContext(Studio);

// The answer to a question. The old answer stays on screen while a new one is computed; late answers are dropped.
// `fresh` says that the answer belongs to the question, so that further questions can build on it.
export function useAnswer(question, args, ready = true) {
  const { source } = useStudio();
  const [state, put] = useState({ answer: null, key: "", busy: ready, error: "" });
  const key = ready ? question + JSON.stringify(args) : "";
  const newest = useRef("");
  newest.current = key;
  useEffect(() => {
    if (!key) return undefined;
    let live = true;
    const current = () => live && newest.current === key;
    put((old) => ({ ...old, busy: true }));
    source.ask(question, args).then(
      (answer) => current() && put({ answer, key, busy: false, error: "" }),
      (error) => current() && put({ answer: null, key, busy: false, error: String(error.message || error) }),
    );
    return () => { live = false; };
  }, [key, source]);
  return { ...state, fresh: state.key === key && !state.busy };
}

// The width of an element, kept up to date.
export function useWidth(ref, start = 600) {
  const [width, put] = useState(start);
  useLayoutEffect(() => {
    const measure = () => ref.current && put(ref.current.clientWidth || start);
    measure();
    if (typeof ResizeObserver === "undefined" || !ref.current) return undefined;
    const watcher = new ResizeObserver(measure);
    watcher.observe(ref.current);
    return () => watcher.disconnect();
  }, [ref.current]);
  return width;
}

// `place` as words: the only stack of a model needs no name.
export const layerName = (t, place, layer) => `${place === "stack" || !place ? "" : t("place_" + place) + " "}${t("layer")} ${layer}`;
export const tagWord = (t, tag) => t("tag_" + (tag ? tag.replace(/[ -]/g, "_") : "none"));
export const streamName = (t, name) => name.replace("embedding", t("embedding")).replace("layer", t("after_layer"));
