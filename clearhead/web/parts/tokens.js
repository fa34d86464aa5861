// Tokens as a row of chips. The strip under a chip shows how likely the model found the token.
import { html, useStudio } from "../ui.js";
import { css } from "../colours.js";
import { percent, visible } from "../format.js";

export function Tokens({ labels, raw = [], ids = [], chances = [], selected = -1, onSelect, generated = 0, label }) {
  const { t, dark } = useStudio();
  const scale = { kind: "probability", top: 1, dark };
  const about = (n) => [ids.length ? `#${ids[n]}` : "", raw[n] || "", chances[n] >= 0 ? t("chance_was", { p: percent(chances[n]) }) : ""].filter(Boolean).join(" · ");
  return html`<div class="tokens" role="group" aria-label=${label || t("tokens_title")}>${labels.map((label, n) => html`<button key=${n} class=${"tok" + (n >= labels.length - generated ? " new" : "")} aria-pressed=${n === selected} title=${about(n)} onClick=${() => onSelect(n)}>
    ${visible(label)}${chances.length > 0 && html`<i aria-hidden="true" style=${{ background: chances[n] >= 0 ? css(chances[n], scale) : "transparent" }}></i>`}</button>`)}</div>`;
}
