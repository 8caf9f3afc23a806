// What the middle shows: the tables of one or two runs, merged, filtered and coloured, and which tokens are in focus.

import { state, mechanismTitle } from "./store.js";
import { headTable, headScores, previewTable, windowOf } from "./runs.js";
import { axisOf, groupsOf } from "./tokens.js";
import { grouped, filtered, softmaxAt, largestOf } from "./tables.js";
import { levelsOf } from "./codes.js";

// The runs to show side by side: one, or two with what tells them apart.
export function panes() {
  if (!state.run) return [];
  const { kind, value } = state.compare;
  if (!state.other) return [{ run: state.run, title: "" }];
  if (kind === "before") return [{ run: state.base, title: "before" }, { run: state.run, title: "after" }];
  const titles = { twin: "random twin", mechanism: `with ${mechanismTitle(value)}`, text: "the other text" };
  return [{ run: state.run, title: state.run === state.base ? "this model" : "changed" }, { run: state.other, title: titles[kind] }];
}

export function placeIn(run) {
  const layer = Math.min(state.layer, run.layers.length - 1);
  const head = typeof state.head === "number" ? Math.min(state.head, run.layers[layer].heads - 1) : state.head;
  return { layer, head };
}

let dialBuffer = null, dialLevels = null; // used again for every place of the dial
let dialled = null;

// The weights at the dial's beta, computed here while it is dragged; null if the products have not come yet.
function dialTable(run) {
  const { layer, head } = placeIn(run);
  if (state.beta === null || run !== state.run || typeof head !== "number") return null;
  const scores = headScores(run, layer, head);
  if (!scores) return null;
  if (dialBuffer?.length !== scores.products.length) dialBuffer = new Float32Array(scores.products.length);
  if (dialled?.scores !== scores || dialled.beta !== state.beta) {
    dialled = { scores, beta: state.beta, table: softmaxAt(scores, state.beta, dialBuffer) };
  }
  return dialled.table;
}

const groupsOfRuns = new WeakMap();

// The groups of an axis; the same list again while nothing about it changes, since every move of the dial asks for it.
function groupsShown(run, layer, side, length) {
  if (!groupsOfRuns.has(run)) groupsOfRuns.set(run, new Map());
  const lists = groupsOfRuns.get(run);
  const axis = axisOf(run, layer, side);
  const key = [axis.which, state.words, state.special, length].join();
  if (!lists.has(key)) lists.set(key, groupsOf(axis, state.words, state.special, length));
  return lists.get(key);
}

const views = new WeakMap();

// Everything needed to draw a run's head: tables, groups of tokens, levels of colour. Null while nothing has come.
export function viewOf(run) {
  const { layer, head } = placeIn(run);
  const dial = dialTable(run);
  let data = dial ?? headTable(run, layer, head);
  const preview = !data;
  data ??= previewTable(run, layer, head);
  if (!data) return null;
  const options = [layer, head, windowOf(run.layers[layer]), state.words, state.special, state.threshold, state.top, state.contrast].join();
  const stored = views.get(data);
  if (stored?.options === options) return stored;
  const place = run.layers[layer];
  const rowGroups = groupsShown(run, layer, "queries", data.rows);
  const columnGroups = groupsShown(run, layer, "keys", data.columns);
  const table = grouped(data, rowGroups, columnGroups);
  const shown = filtered(table, state.threshold, state.top);
  const most = state.contrast ? largestOf(shown.weights) || 1 : 1;
  if (dial && dialLevels?.length !== shown.weights.length) dialLevels = new Uint16Array(shown.weights.length);
  const view = {
    options, run, place, layer, head, data, preview, table, shown, rowGroups, columnGroups, most,
    rows: table.rows, columns: table.columns, levels: levelsOf(shown.weights, shown.visible, most, dial ? dialLevels : undefined),
  };
  views.set(data, view);
  return view;
}

function groupAt(groups, token) {
  return groups.findIndex((group) => group.tokens.includes(token));
}

// Groups in focus: those that are locked, or under the pointer; null if none.
export function focusOf(view) {
  if (state.locked) {
    const rows = [...new Set(state.locked.rows.map((token) => groupAt(view.rowGroups, token)))].filter((row) => row >= 0);
    const columns = [...new Set(state.locked.columns.map((token) => groupAt(view.columnGroups, token)))].filter((column) => column >= 0);
    if (rows.length || columns.length) return { rows, columns, locked: true };
  }
  const { row, column } = state.hover ?? {};
  const rows = row >= 0 && row < view.rows ? [row] : [];
  const columns = column >= 0 && column < view.columns ? [column] : [];
  return rows.length || columns.length ? { rows, columns, locked: false } : null;
}

// The pair of groups that the Why card explains: the one in focus, completed by the strongest partner.
export function pairOf(view, focus) {
  const rows = focus?.rows.length ? focus.rows : view.rowGroups.keys();
  const columns = focus?.columns.length ? focus.columns : null;
  let best = null, most = -1;
  for (const row of rows) {
    if (!focus && view.rowGroups[row].special) continue;
    for (const column of columns ?? view.columnGroups.keys()) {
      if (!focus && (view.columnGroups[column].special || view.columns < 3)) continue;
      const weight = Math.abs(view.table.weights[row * view.columns + column]);
      if (view.table.visible[row * view.columns + column] && weight > most) [best, most] = [{ row, column }, weight];
    }
  }
  if (best) return best;
  const [row] = focus?.rows.length ? focus.rows : [0];
  return view.rows && view.columns ? { row, column: columns?.[0] ?? 0 } : null;
}

// The pair of single tokens with the most weight within a pair of groups: q and k belong to tokens, not to words.
export function tokenPair(view, pair) {
  let best = null, most = -1;
  for (const query of view.rowGroups[pair.row].tokens) {
    for (const key of view.columnGroups[pair.column].tokens) {
      const weight = Math.abs(view.data.weights[query * view.data.columns + key]);
      if (weight > most) [best, most] = [{ query, key }, weight];
    }
  }
  return best;
}

// Whether a number of the table is exact, or was read from a thumbnail or an 8-bit code.
export function isExact(view, row, column) {
  const { exact } = view.table;
  return !view.preview && (typeof exact === "boolean" ? exact : Boolean(exact[row * view.columns + column]));
}
