// The notebook widget: the kernel answers.
import { kernel } from "./source.js";
import { start } from "./studio.js";

export function renderWidget({ model, el }) {
  const root = document.createElement("div");
  el.appendChild(root);
  start(root, kernel(model), { ...model.get("options"), address: false });
}
