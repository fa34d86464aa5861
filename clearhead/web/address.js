// One selection for all views, kept in the address.

export const START = {
  view: "write", model: "", text: null, otherModel: "", otherText: "", compare: false,
  place: "", layer: 0, head: 0, query: -1, key: -1, open: false,
  step: "", cell: "", token: "", changes: "", tour: 0, lang: "", theme: "",
};

export function readAddress(hash) {
  const state = { ...START };
  for (const [key, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!(key in START)) continue;
    const kind = typeof START[key];
    state[key] = kind === "number" ? Number(value) || 0 : kind === "boolean" ? value === "true" : value;
  }
  return state;
}

export function writeAddress(state) {
  const out = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) if (key in START && value !== START[key] && value !== null) out.set(key, String(value));
  return "#" + out.toString();
}
