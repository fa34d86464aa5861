// Numbers and tokens as text.

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(2) : Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 %";
  return (value >= 0.0995 ? (100 * value).toFixed(1) : value >= 0.0001 ? (100 * value).toFixed(2) : "<0.01") + " %";
}

const LARGE = [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
export function big(value) {
  for (const [size, letter] of LARGE) if (value >= size) return (value / size).toPrecision(3) + letter;
  return String(value);
}

const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
export function bytes(value) {
  for (const [size, name] of SIZES) if (value >= size) return `${(value / size).toPrecision(3)} ${name}`;
  return `${value} B`;
}

// Spaces and line ends become visible marks.
export const visible = (text) => (text === "" ? "∅" : String(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·"));
