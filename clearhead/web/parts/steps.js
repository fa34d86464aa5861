// The names of steps: `stack.blocks.2.mixer.scores` is the step `scores` of block 2.

export const isBlock = (name) => name.split(".")[1] === "blocks";
export const sectionOf = (name) => (isBlock(name) ? name.split(".").slice(0, 3).join(".") : /^head\b/.test(name) || /final_norm$/.test(name) ? "output." + (name.startsWith("encoder") ? "encoder" : "") : name.split(".")[0]);
export const inside = (name) => (isBlock(name) ? name.split(".").slice(3).join(".") : name);

// The word for a step: `stack.blocks.2.ffn_residual.before` -> `norm`.
export function stepWord(name) {
  const parts = name.split("."), last = parts[parts.length - 1];
  if (last === "before" || last === "after") return "norm";
  if (/_residual$/.test(last)) return "residual";
  if (parts.includes("ffn") && parts[parts.length - 2] !== "ffn") return parts[parts.length - 2] + "_" + last;
  return last;
}
