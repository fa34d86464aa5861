// Two lists of probabilities, token by token: the paler bar is the first.
import { html, useStudio } from "../ui.js";
import { percent, visible } from "../format.js";

// [{id, text, probability}] twice -> [{id, text, before, after}], the likeliest first
export function merge(before, after, count = 14) {
  const out = new Map();
  for (const one of before) out.set(one.id, { id: one.id, text: one.text, before: one.probability });
  for (const one of after) out.set(one.id, { ...(out.get(one.id) || { id: one.id, text: one.text }), after: one.probability });
  const most = (one) => Math.max(one.after || 0, one.before || 0);
  return [...out.values()].sort((a, b) => most(b) - most(a)).slice(0, count);
}

export function Versus({ items, names }) {
  const { t } = useStudio();
  const top = Math.max(...items.map((one) => Math.max(one.before || 0, one.after || 0)), 1e-9);
  const lane = (value, kind) => html`<span class=${kind} style=${{ width: (100 * (value || 0)) / top + "%" }}></span>`;
  return html`<ul class="versus" aria-label=${names.join(" / ")}>
    ${items.map((one) => html`<li key=${one.id}><span class="name">${visible(one.text)}</span><span class="lanes" aria-hidden="true">${lane(one.before, "was")}${lane(one.after, "now")}</span>
      <span class="num"><span class="soft">${one.before === undefined ? "–" : percent(one.before)}</span> → <b data-after=${one.id} data-value=${one.after}>${one.after === undefined ? "–" : percent(one.after)}</b></span></li>`)}
  </ul><p class="legend"><span>${t("paler", { a: names[0], b: names[1] })}</span></p>`;
}
