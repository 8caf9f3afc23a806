// Tokens as they are shown: readable text, word pieces merged to words, special tokens left out.

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
  const which = run.layers[layer][side];
  if (which === "channels") {
    const count = run.layers[layer][side === "queries" ? "rows" : "columns"];
    return { which, names: Array.from({ length: count }, (_, index) => `channel ${index}`), special: [], words: [] };
  }
  const sources = which === "sources" && info.sources;
  const names = sources ? info.sources : info.tokens;
  const special = (sources ? info.source_special : info.special) ?? [];
  const words = (sources ? info.source_words : info.words) ?? [];
  return { which, names, special, words };
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
export function isolated(text) {
  return `\u2068${text}\u2069`;
}

export function quoted(text) {
  return isolated(`“${text}”`);
}
