import { html, useStudio, useAnswer } from "../ui.js";

// Each of the ten steps points at real numbers: the view, and the step of the model that shows them.
const STOPS = [
  { view: "write" }, { view: "flow", step: /^embedding$|embedding\.tokens$|^source\.tokens$/ }, { view: "flow", step: /mixer\.qkv$|mixer\.query$/ }, { view: "flow", step: /mixer\.scores$/ },
  { view: "flow", step: /mixer\.weights$/ }, { view: "flow", step: /mixer\.weights$/ }, { view: "flow", step: /mixer\.mixed$/ }, { view: "flow", step: /mixer\.out$/ }, { view: "flow", step: /mixer_residual$/ }, { view: "write" },
];

export function Tour() {
  const { t, go, state, args } = useStudio();
  const steps = useAnswer("flow", args, state.tour > 0);
  const move = (n) => {
    const stop = STOPS[n - 1], found = stop && stop.step && steps.answer && steps.answer.steps.find((step) => stop.step.test(step.name));
    go({ tour: n, ...(stop ? { view: stop.view } : {}), ...(found ? { step: found.name, cell: "" } : {}) }, true);
  };
  if (!state.tour) return null;
  const n = Math.min(state.tour, 10);
  return html`<aside class="tour" aria-label=${t("tour")}><p class="note" style=${{ margin: 0 }}>${t("tour_of", { n })}</p><h2>${t(`tour${n}_title`)}</h2><p>${t("tour" + n)}</p>
    <div class="row"><button class="do" disabled=${n === 1} onClick=${() => move(n - 1)}>${t("tour_back")}</button>${n < 10 && html`<button class="do main" onClick=${() => move(n + 1)}>${t("tour_next")}</button>`}<button class="do" onClick=${() => move(n)}>${t("tour_show")}</button><span class="grow"></span><button class="do" onClick=${() => go({ tour: 0 })}>${t("tour_close")}</button></div></aside>`;
}
