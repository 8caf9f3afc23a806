// The state of the page, and when its regions are drawn: once per animation frame, only those that changed.

export const state = {
  live: true, models: [], mechanisms: [], pictures: [], version: "",
  model: "", input: { text: "" }, compare: { kind: "none", value: "" },
  base: null, run: null, other: null, changes: [],
  layer: 0, head: 0, window: null, hover: null, locked: null, beta: null, scope: "head",
  words: false, special: false, threshold: 0, top: 0, view: "both", alignment: true, contrast: false,
  sort: "layer", colour: "attention", progress: null,
  steps: [], step: null, generated: null, count: 12,
  length: null, costUnit: "flops", theme: "auto", busy: "", error: "", opened: false, asksFolder: false, lab: false,
};

const regions = new Map();
const dirty = new Set();
let waiting = [];
let frame = 0;

export function region(name, draw) {
  regions.set(name, draw);
}

export function redraw(...names) {
  for (const name of names.length ? names : regions.keys()) dirty.add(name);
  if (!frame) frame = requestAnimationFrame(drawDirty);
}

function drawDirty() {
  frame = 0;
  const names = [...dirty];
  dirty.clear();
  for (const name of names) regions.get(name)?.();
  if (frame) return;
  for (const resolve of waiting) resolve();
  waiting = [];
}

const unanswered = new Set();

// Counts a question as open until its answer, or its failure, has come.
export function awaited(promise) {
  unanswered.add(promise);
  const over = () => unanswered.delete(promise);
  promise.then(over, over);
  return promise;
}

// Until every question is answered and the answers are drawn.
export async function quiet() {
  do {
    await Promise.allSettled(unanswered);
    if (frame) await new Promise((resolve) => waiting.push(resolve));
  } while (frame || unanswered.size);
}

export function mechanismTitle(name) {
  return state.mechanisms.find((mechanism) => mechanism.name === name)?.title ?? name;
}
