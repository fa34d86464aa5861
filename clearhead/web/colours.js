// One colour scale for each kind of quantity. Lightness alone shows the order, so the scales work without colour vision.

const STOPS = {
  light: {
    weight: ["#f4f7fb", "#dbe7f4", "#b7d0ea", "#85b1dc", "#4e8dc9", "#266bb0", "#0f4c8c", "#0a2f5f"],
    probability: ["#f3f8f5", "#d5ebdf", "#a9d8c1", "#70bf9f", "#3a9f80", "#1b7f68", "#0b5f52", "#053f3a"],
    signed: ["#7f3b08", "#b35806", "#e08214", "#fdb863", "#fee0b6", "#f7f6f3", "#d8daeb", "#b2abd2", "#8073ac", "#542788", "#2d004b"],
    magnitude: ["#f6f5f2", "#e3dfd6", "#c7bfb0", "#a59a86", "#7f735d", "#584d3a", "#332b1e"],
  },
  dark: {
    weight: ["#1c222a", "#1d3048", "#1f4670", "#2c659c", "#4a8bc7", "#7db3e3", "#b5d7f4", "#eaf5ff"],
    probability: ["#1a2422", "#193732", "#1b4f46", "#24705f", "#3b957c", "#6bbd9c", "#a8dfc3", "#e8fbf0"],
    signed: ["#ffd9a8", "#ffb566", "#e08a2e", "#a55f1a", "#5a3a1e", "#22272e", "#35315c", "#574d9c", "#8578d1", "#b3a9f0", "#e2dcff"],
    magnitude: ["#212224", "#34342f", "#4f4c42", "#736d5c", "#9b927b", "#c5bca2", "#f0e9d4"],
  },
};
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function table(stops) {
  const colours = stops.map(rgb);
  return Array.from({ length: 256 }, (_, n) => {
    const x = (n / 255) * (colours.length - 1), low = Math.min(Math.floor(x), colours.length - 2), part = x - low;
    return colours[low].map((c, i) => Math.round(c + part * (colours[low + 1][i] - c)));
  });
}

const TABLES = Object.fromEntries(Object.entries(STOPS).map(([theme, kinds]) => [theme, Object.fromEntries(Object.entries(kinds).map(([kind, stops]) => [kind, table(stops)]))]));

export const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// A scale is {kind, top, dark}. Signed values lie around the middle; the others follow a square root, so that small ones show.
export function share(value, { kind, top }) {
  if (kind === "signed") return clamp(0.5 + value / (2 * (top || 1)), 0, 1);
  return Math.sqrt(clamp(value / (top || 1), 0, 1));
}
const tableOf = (scale) => TABLES[scale.dark ? "dark" : "light"][scale.kind];
export const colour = (value, scale) => tableOf(scale)[Math.round(255 * (Number.isFinite(value) ? share(value, scale) : 0)) || 0];
export const css = (value, scale) => `rgb(${colour(value, scale).join(",")})`;

// Black or white, whichever has more contrast on the colour.
export function ink(value, scale) {
  const [r, g, b] = colour(value, scale).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#101214" : "#ffffff";
}
export const gradient = (kind, dark) => `linear-gradient(to right, ${STOPS[dark ? "dark" : "light"][kind].join(",")})`;

export function largest(values) {
  let top = 0;
  for (const value of values) if (Number.isFinite(value) && Math.abs(value) > top) top = Math.abs(value);
  return top;
}

// Curves: six colours that differ in lightness too, each with its own dash.
export const CURVES = { light: ["#0b62a3", "#b4470a", "#1d7a4a", "#8a3f86", "#7a6a00", "#3b3b98"], dark: ["#7cc0f4", "#ffa45c", "#6fd39b", "#e7a3e2", "#e8da5e", "#b3b5ff"] };
export const DASHES = ["", "7 3", "2 3", "9 3 2 3", "1 4", "13 4"];
