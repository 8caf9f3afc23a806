// Runs as they arrive frame by frame, and the tables of their heads, fetched when they are shown.

import { state, redraw, awaited } from "./store.js";
import { weightOfCode, MASKED } from "./codes.js";

export function newRun(message) {
  const numbers = {}; // encoder, decoder and cross-attention each count their layers from 0
  const layers = message.layers.map((layer, position) => {
    const stack = message.sources ? (layer.kind === "cross" ? "cross" : layer.side) : "layer";
    numbers[stack] = (numbers[stack] ?? -1) + 1;
    return { ...layer, position, stack, number: numbers[stack], loaded: false };
  });
  return { id: message.run, info: message, layers, changes: [], strongest: null, done: null, effects: null, twinEffects: null };
}

export function addFrame(run, message) {
  if (message.type === "done") {
    run.done = message;
    return;
  }
  const layer = run.layers.find((candidate) => candidate.index === message.index);
  if (message.type === "strongest") {
    run.strongest = { layer: layer.position, head: message.head };
    return;
  }
  const { type, index, data, ...facts } = message; // thumbnails, then labels, then statistics
  Object.assign(layer, facts, type === "layer" ? { codes: data, loaded: true } : {});
}

// A head in words.
export function describeHead(place, head) {
  const layer = `${{ cross: "cross-attention" }[place.stack] ?? place.stack} ${place.number}`;
  const words = { mean: "mean over heads", max: "maximum over heads", rollout: "rollout over all layers" };
  return head === "rollout" ? words.rollout : `${layer}, ${words[head] ?? `head ${head}`}`;
}

// The window of a picture that is shown; null for a layer that sees its map whole.
export function windowOf(place) {
  if (!place.windows) return null;
  return Math.min(state.window ?? place.window, place.windows[0] * place.windows[1] - 1);
}

const ROOM = 48e6; // bytes of tables that stay in memory
const tables = new Map();
const pending = new Map();
const failed = new Set(); // asked for once: an error is said once
let tableSource = null;
let complain = () => {};

export function readFrom(newSource, onError) {
  tableSource = newSource;
  complain = onError;
}

function sizeOf(table) {
  return Object.values(table).reduce((size, part) => size + (part?.byteLength ?? 0), 0);
}

function fetched(place, ask, names) {
  if (tables.has(place)) {
    const table = tables.get(place);
    tables.delete(place); // the most recently used stands last
    tables.set(place, table);
    return table;
  }
  if (!pending.has(place) && !failed.has(place)) {
    const wait = ask().then((table) => {
      tables.set(place, table);
      let total = [...tables.values()].reduce((size, each) => size + sizeOf(each), 0);
      for (const [oldest, each] of tables) {
        if (total <= ROOM || oldest === place) break;
        tables.delete(oldest);
        total -= sizeOf(each);
      }
    }).catch((problem) => {
      failed.add(place);
      complain(problem);
    }).finally(() => {
      pending.delete(place);
      redraw(...names);
    });
    pending.set(place, awaited(wait));
  }
  return null;
}

// Exact weights of a head, or null while they are on their way.
export function headTable(run, layer, head) {
  const window = windowOf(run.layers[layer]);
  const place = `${run.id}/${layer}/${head}/${window}`;
  const ask = head === "rollout" ? () => tableSource.rollout(run) : () => tableSource.head(run, layer, head, window);
  return fetched(place, ask, ["head", "why"]);
}

export function headScores(run, layer, head) {
  if (run.layers[layer].queries === "channels") return null; // their products are sums over all tokens
  const window = windowOf(run.layers[layer]);
  const place = `${run.id}/${layer}/${head}/${window}/scores`;
  return fetched(place, () => tableSource.scores(run, layer, head, window), ["head", "whatif"]);
}

let preview = null; // the latest

// What the thumbnail tells about a head, shown until its exact weights have come.
export function previewTable(run, layer, head) {
  const place = run.layers[layer];
  if (!place.loaded || typeof head !== "number" || windowOf(place) !== (place.window ?? null)) return null;
  if (preview?.place !== place || preview.head !== head) preview = { place, head, table: enlarged(place, head) };
  return preview.table;
}

function enlarged({ rows, columns, size, codes, pool }, head) {
  const [high, wide] = size;
  const weights = new Float32Array(rows * columns);
  const visible = new Uint8Array(rows * columns);
  for (let row = 0, i = 0; row < rows; row++) {
    const from = head * high * wide + Math.floor(row / pool[0]) * wide;
    for (let column = 0; column < columns; column++, i++) {
      const code = codes[from + Math.floor(column / pool[1])];
      visible[i] = code === MASKED ? 0 : 1;
      if (visible[i]) weights[i] = weightOfCode(code);
    }
  }
  return { rows, columns, weights, visible, exact: false };
}
