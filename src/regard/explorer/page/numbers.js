// Numbers as people read them.

export function exactNumber(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size < 1e-4 || size >= 1e6 ? value.toExponential(4) : String(Number(value.toPrecision(6)));
}

export function shortNumber(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return "∞";
  if (value === 0) return "0";
  return Math.abs(value) < 0.5 * 10 ** -digits ? `<${10 ** -digits}` : value.toFixed(digits);
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  const hundred = 100 * value;
  return `${hundred >= 99.95 || hundred === 0 ? hundred.toFixed(0) : hundred >= 0.095 ? hundred.toFixed(1) : "<0.1"} %`;
}

export function roundPercent(value) {
  const hundred = 100 * value;
  return hundred >= 9.95 ? `${hundred.toFixed(0)}%` : hundred >= 0.05 ? `${hundred.toFixed(1)}%` : "<.1%";
}

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

// 1.24 GFLOP; bytes likewise, by thousands.
export function withPrefix(value, unit) {
  if (!value) return `0 ${unit}`;
  const power = Math.min(PREFIXES.length - 1, Math.max(0, Math.floor(Math.log10(value) / 3)));
  const scaled = value / 1000 ** power;
  return `${scaled >= 100 ? scaled.toFixed(0) : scaled >= 10 ? scaled.toFixed(1) : scaled.toFixed(2)} ${PREFIXES[power]}${unit}`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}
