// A conversation, for models with a chat template.
import { html, useState, useStudio } from "../ui.js";
import { Panel, Tools } from "../parts/panel.js";

export function Chat({ options }) {
  const { t, args, source, fail } = useStudio();
  const [messages, put] = useState([]), [draft, putDraft] = useState(""), [busy, putBusy] = useState(false), [python, putPython] = useState("");
  const send = async (event) => {
    event.preventDefault();
    if (!draft.trim()) return;
    const asked = [...messages, { role: "user", content: draft }];
    put(asked);
    putDraft("");
    putBusy(true);
    try {
      const answer = await source.ask("chat", { model: args.model, messages: asked, ...options });
      put([...asked, { role: "assistant", content: answer.text }]);
      putPython(answer.python);
    } catch (error) { fail(error); }
    putBusy(false);
  };
  return html`<${Panel} title=${t("chat")} part="chat" tools=${html`<${Tools} python=${python}><button class="quiet" disabled=${!messages.length} onClick=${() => put([])}>${t("clear")}</button></${Tools}>`}>
    ${messages.map((one, n) => html`<p key=${n}><b>${t("role_" + one.role)}</b> ${one.content}</p>`)}
    ${busy && html`<p class="busy" role="status">${t("loading")}</p>`}
    <form class="row" onSubmit=${send}><input aria-label=${t("message")} placeholder=${t("message")} value=${draft} onInput=${(event) => putDraft(event.target.value)} /><button class="do main" disabled=${busy}>${t("send")}</button></form></${Panel}>`;
}
