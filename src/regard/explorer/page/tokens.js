// Tokens as they are shown: readable text, word pieces merged to words, special tokens left out.

import { windowOf } from "./runs.js";

const MARKS = /^(?:##|[Ġ▁ ])/u;
const SIGNS = { "\n": "⏎", "\r": "␍", "\t": "⇥", "Ċ": "⏎", "ĉ": "⇥" };

// A token's text for people: marks of word beginnings dropped, invisible characters made visible.
export function readable(token, continues = false) {
  if (token === "") return "∅";
  const plain = token.replace(MARKS, "");
  if (plain === "") return "␣";
  const seen = plain.replace(/[\n\r\tĊĉ]/g, (sign) => SIGNS[sign]).replace(/[\u0000-\u001f\u007f]/g, "␦");
  return continues ? `·${seen}` : seen.trim() === "" ? "␣" : seen;
}

// The tokens of one axis of a layer: names, which are special, which word each belongs to.
export function axisOf(run, layer, side) {
  const { info } = run;
  const place = run.layers[layer], which = place[side];
  if (place.grid && which === "tokens" && !info.tokens.length) return positionsOf(place, windowOf(place));
  if (which === "channels") {
    const count = place[side === "queries" ? "rows" : "columns"];
    return { which, names: Array.from({ length: count }, (_, index) => `channel ${index}`), special: [], words: [] };
  }
  const sources = which === "sources" && info.sources;
  const names = sources ? info.sources : info.tokens;
  const special = (sources ? info.source_special : info.special) ?? [];
  const words = (sources ? info.source_words : info.words) ?? [];
  return { which, names, special, words };
}

// Row and column of each position of a window in its map, of which the last windows may reach beyond it.
function positionsOf({ rows, grid, windows }, window) {
  const [down, across] = grid, side = windows ? Math.round(Math.sqrt(rows)) : across;
  const [top, left] = windows ? [Math.floor(window / windows[1]) * side, (window % windows[1]) * side] : [0, 0];
  const places = Array.from({ length: rows }, (_, index) => [top + Math.floor(index / side), left + (index % side)]);
  const special = places.map(([row, column]) => row >= down || column >= across);
  return { which: `tokens ${grid} ${window}`, names: places.map(([row, column], index) => special[index] ? "padding" : `${row + 1}, ${column + 1}`), special, words: [], places };
}

// What an axis shows: a list of { tokens, text, special }. Merging and hiding never leave it empty.
export function groupsOf(axis, merge, hide, length) {
  const groups = [];
  for (let i = 0; i < length; i++) {
    const name = axis.names[i] ?? "";
    const special = Boolean(axis.special[i]);
    if (hide && special) continue;
    const word = axis.words[i];
    const continues = i > 0 && word !== null && word !== undefined && word === axis.words[i - 1] && !special;
    const last = groups[groups.length - 1];
    if (merge && continues && last && last.word === word) {
      last.tokens.push(i);
      last.text += readable(name);
    } else {
      groups.push({ tokens: [i], text: readable(name, continues && !merge), special, word });
    }
  }
  return groups.length ? groups : groupsOf(axis, merge, false, length);
}

// Text in one's own direction, so that right-to-left tokens do not turn what stands beside them.
function isolated(text) {
  return `\u2068${text}\u2069`;
}

export function quoted(text) {
  return isolated(`“${text}”`);
}
