// What the page does when it is asked to: run a model, choose a head, lock tokens, change attention, find effects.

import { state, redraw, awaited } from "./store.js";
import { newRun, addFrame, readFrom, windowOf } from "./runs.js";
import { readAddress, writeAddress } from "./address.js";

let source = null;
let work = null; // the computation under way; the next one cancels it

export function say(problem) {
  if (problem?.name === "AbortError") return;
  state.error = String(problem?.message ?? problem);
  redraw("top");
}

export function modelNamed(name) {
  return state.models.find((model) => model.name === name);
}

export function exampleOf(model) {
  return model.kind === "image" ? { image: model.example?.image ?? state.pictures[0] ?? null } : { ...model.example };
}

export async function start(newSource) {
  source = newSource;
  state.live = source.live;
  readFrom(source, say);
  Object.assign(state, await source.models());
  Object.assign(state, { model: state.start?.model ?? "", input: state.start?.input ?? {} });
  const named = readAddress();
  if (state.model && !modelNamed(state.model)) state.models.push(entryOf(state.model, state.input)); // a folder, in a link
  const model = modelNamed(state.model) ?? state.models.find((candidate) => candidate.installed) ?? state.models[0];
  if (!model) throw new Error("No model is here. `regard models` says how to install one.");
  state.model = model.name;
  const filled = Object.values(state.input).some(Boolean);
  if (!filled) state.input = exampleOf(model);
  redraw();
  await runModel(named);
}

// One computation at a time, with what it is doing for the reader; errors are said in the top bar.
async function computing(words, compute) {
  work?.abort();
  const mine = new AbortController();
  work = mine;
  Object.assign(state, { busy: words, error: "", progress: null });
  redraw("top", "model");
  try {
    await compute(mine.signal);
  } catch (problem) {
    if (work === mine) say(problem);
  } finally {
    if (work === mine) {
      Object.assign(state, { busy: "", progress: null });
      work = null;
      redraw();
      writeAddress();
    }
  }
}

export function cancel() {
  work?.abort();
}

export function idle() {
  return work === null;
}

// Thumbnails and the strongest head, with which a page opens; the rest comes to its end whatever follows.
async function collected(body, signal, arrived = () => {}) {
  let run = null;
  const stream = new AbortController();
  signal.throwIfAborted();
  signal.addEventListener("abort", () => run?.strongest || stream.abort());
  await source.run(body, (message) => {
    if (message.type === "run") run = newRun(message);
    else addFrame(run, message);
    arrived(run);
  }, stream.signal);
  if (!run?.done) throw new Error("The run ended before its output came.");
  return run;
}

// Runs the model on its input, then what it is compared with. `keepHead`: the head that a link names stays chosen.
export function runModel(keepHead = false) {
  return computing("Running the model", async (signal) => {
    const known = modelNamed(state.model);
    if (known && !known.installed) throw new Error(`${known.title} is not installed: ${known.install}`);
    const lock = keepHead ? state.locked : null;
    Object.assign(state, {
      hover: null, locked: null, other: null, beta: null,
      steps: [], step: null, generated: null, length: null, ...(keepHead ? {} : { changes: [], colour: "attention", window: null }),
    });
    if (!keepHead && state.compare.kind === "before") state.compare = { kind: "none", value: "" };
    await collected({ model: state.model, input: state.input, changes: [], twin: false }, signal, (run) => {
      if (state.base !== run) {
        if (signal.aborted) return;
        Object.assign(state, { base: run, run, opened: false });
      }
      redraw("model", ...(state.opened ? ["head", "whatif"] : []));
      if (state.opened || !run.strongest) return;
      if (!state.live && run.info.input) state.input = { ...run.info.input };
      openRun(keepHead, lock);
    });
    if (state.changes.length) await runChanged(signal);
    await runOther(signal);
  });
}

// A model that is not in the menu, by its path and what it reads.
function entryOf(path, example) {
  const kind = "source" in example ? "pair" : "image" in example ? "image" : "text";
  return { name: path, title: path, kind, installed: true, example };
}

// A model by its path. What it reads is found by trying: the server's refusal names it.
export async function openFolder(path) {
  const text = modelNamed("smollm2")?.example.text ?? "The quick brown fox jumps over the lazy dog.";
  const source = modelNamed("translator")?.example.source ?? text;
  const examples = [{ text }, { source, target: null }, { image: state.pictures[0] ?? null }];
  state.models = state.models.filter((model) => model.name !== path);
  for (const example of examples) {
    const others = state.models.filter((model) => model.name !== path);
    Object.assign(state, { models: [...others, entryOf(path, example)], model: path, input: { ...example } });
    await runModel();
    if (!/^(input|image): expected/.test(state.error)) return;
  }
}

function openRun(keepHead, lock) {
  state.opened = true;
  const layers = state.base.layers;
  const fits = keepHead && layers[state.layer] && (typeof state.head !== "number" || state.head < layers[state.layer].heads);
  if (!fits) Object.assign(state, state.base.strongest);
  state.locked = lock;
  const picture = state.base.info.kind === "image";
  if (picture && state.view === "both") state.view = "picture";
  if (!picture && state.view === "picture") state.view = "both";
  redraw();
}

// The tokens of `base` once more, changed or by a twin. A server that has dropped that run reads the text again.
async function again(more, signal) {
  const body = { changes: [], twin: false, ...more };
  try {
    return await collected({ of: state.base.id, ...body }, signal);
  } catch (problem) {
    if (!/^run: expected a recent run/.test(problem.message)) throw problem;
    const { generated, input } = state.base.info;
    return collected({ model: state.model, input: generated === null ? state.input : input, ...body }, signal);
  }
}

// The model with its changes; one that cannot be computed is taken back, unless something newer goes on with it.
async function runChanged(signal) {
  const { changes } = state;
  try {
    state.run = Object.assign(await again({ changes }, signal), { changes });
  } catch (problem) {
    if (work?.signal === signal) {
      state.changes = state.run.changes;
      if (!state.changes.length && state.compare.kind === "before") state.compare = { kind: "none", value: "" };
    }
    throw problem;
  }
  redraw();
}

async function runOther(signal) {
  const { kind, value } = state.compare;
  state.other = null;
  if (kind === "before") state.other = state.base;
  else if (kind === "twin") state.other = await again({ twin: true }, signal);
  else if (kind === "mechanism" && value) state.other = await again({ changes: [{ layers: null, heads: null, mechanism: value }] }, signal);
  else if (kind === "text" && value.trim()) {
    const input = state.input.source === undefined ? { text: value } : { source: value, target: null };
    state.other = await collected({ model: state.model, input, changes: [], twin: false }, signal);
  }
  redraw();
}

export function compareWith(kind, value = "") {
  state.compare = { kind, value };
  redraw();
  if (kind === "none" || (!value && (kind === "mechanism" || kind === "text"))) {
    state.other = null;
    writeAddress();
    return Promise.resolve();
  }
  return computing(kind === "twin" ? "Running a random twin" : "Running the comparison", runOther);
}

// Changes of the model's attention, run again; the unchanged run stays beside it.
export function applyChanges(changes) {
  state.changes = changes;
  state.beta = null;
  if (!changes.length) {
    state.run = state.base;
    if (state.compare.kind === "before") compareWith("none");
    writeAddress();
    redraw();
    return Promise.resolve();
  }
  return computing("Running the changed model", async (signal) => {
    await runChanged(signal);
    await runOther(signal);
  });
}

// Layers and heads of a change, by the scope that is chosen; null means all.
function scopeOf() {
  const layer = state.run.layers[state.layer].index;
  if (state.scope === "model") return { layers: null, heads: null };
  const all = state.scope === "layer" || typeof state.head !== "number";
  return { layers: [layer], heads: all ? null : [state.head] };
}

function sameScope(change, scope) {
  return JSON.stringify([change.layers, change.heads]) === JSON.stringify([scope.layers, scope.heads]);
}

// A change of the same kind in the same scope is replaced; `value` null takes it back.
export function change(kind, value, more = {}) {
  const scope = scopeOf();
  const kept = state.changes.filter((each) => !(kind in each && sameScope(each, scope)));
  if (value !== null) kept.push({ ...scope, [kind]: value, ...more });
  return applyChanges(kept);
}

export function changed(kind, field = kind) {
  const scope = state.run ? scopeOf() : {};
  return state.changes.find((each) => kind in each && sameScope(each, scope))?.[field] ?? null;
}

export function chooseHead(layer, head) {
  const [from, to] = [state.run.layers[state.layer], state.run.layers[layer]];
  const sameMap = String([from.grid, from.windows]) === String([to.grid, to.windows]);
  if (from.queries !== to.queries || from.keys !== to.keys || !sameMap) state.locked = null; // other tokens stand at these places
  if (!sameMap) state.window = null;
  state.layer = layer;
  state.head = typeof head === "number" ? Math.min(head, to.heads - 1) : head;
  Object.assign(state, { hover: null, beta: null });
  redraw("model", "head", "why", "whatif", "cost", "steps");
  writeAddress();
}

// Another window of a picture; its positions are others.
export function chooseWindow(window) {
  const [down, across] = state.run.layers[state.layer].windows;
  Object.assign(state, { window: (window + down * across) % (down * across), hover: null, locked: null, beta: null });
  redraw("head", "why", "whatif");
  writeAddress();
}

export function setOption(name, value) {
  state[name] = value;
  if (name === "words" || name === "special") Object.assign(state, { hover: null });
  redraw();
  writeAddress();
}

// Locks tokens, by their positions; several rows or columns are summed.
export function lockTokens(rows, columns) {
  state.locked = rows.length || columns.length ? { rows, columns } : null;
  redraw("head", "why", "whatif", "steps");
  writeAddress();
}

// Every head of the run silenced once; with `twin`, the same for a randomly initialised twin.
export function findEffects(twin) {
  return computing(twin ? "Silencing each head of the random twin" : "Silencing each head", async (signal) => {
    const shown = state.run;
    const run = twin ? await again({ twin: true, changes: shown.changes }, signal) : shown;
    let heads = null;
    await source.effects(run, (message) => {
      if (message.type === "progress") {
        state.progress = { done: message.done, total: message.total };
        redraw("model");
      } else if (message.type === "effects") heads = message.heads;
    }, signal);
    if (!heads) throw new Error("The effects did not come.");
    shown[twin ? "twinEffects" : "effects"] = new Map(heads.map((effect) => [`${effect.layer}:${effect.head}`, effect]));
    state.colour = "effect";
  });
}

// Tokens after the prompt, by the model as it is changed; `prefix` are ids that are forced, the last of them an
// alternative that was chosen.
export function generateSteps(prefix = []) {
  return computing("Generating", async (signal) => {
    const steps = [], { changes } = state, prompt = state.base.prompt ?? state.base;
    let run = null;
    Object.assign(state, { steps, step: null });
    const begin = changes.length ? await collected({ of: prompt.id, changes, twin: false }, signal) : prompt;
    await source.generate({ run: begin.id, steps: state.count, prefix }, (message) => {
      if (message.type === "step") {
        steps.push(message);
        redraw("steps");
      } else if (message.type === "run") run = newRun(message);
      else if (run) addFrame(run, message);
    }, signal);
    if (!run) return;
    const base = changes.length ? await collected({ of: run.id, changes: [], twin: false }, signal) : run;
    run.changes = changes;
    base.prompt = prompt;
    Object.assign(state, { run, base, generated: run.info.generated ?? null, hover: null, locked: null });
    if (steps.length) chooseStep(Math.max(0, prefix.length - 1));
    await runOther(signal);
  });
}

// The row of a step's attention: the token it was predicted from.
function rowOfStep(step) {
  const layer = state.run.layers[state.layer];
  return layer.queries === "tokens" && state.generated !== null ? state.generated - 1 + step : null;
}

export function chooseStep(step) {
  state.step = step;
  const row = rowOfStep(step);
  if (row !== null) lockTokens([row], []);
  redraw("head", "steps");
}

export function why(query, key, signal) {
  return source.why(state.run, state.layer, state.head, windowOf(state.run.layers[state.layer]), query, key, signal);
}

export function cost(signal) {
  return source.cost(state.run, state.layer, typeof state.head === "number" ? state.head : 0, signal);
}

export function exportedPage(full) {
  return source.page(state.run, full);
}

const tops = new Map();

// The likeliest outputs at a position; null position is the one that the run shows. Null while they are on their way.
export function topAt(run, position) {
  if (position === null || position === run.done?.position || !run.done?.top || !source.live) return run.done?.top ?? null;
  const place = `${run.id}/${position}`;
  if (!tops.has(place)) {
    tops.set(place, run.done.top);
    awaited(source.top(run, position)).then(({ top }) => {
      tops.set(place, top);
      redraw("whatif");
    }).catch(() => {}); // the position has no output of its own: what is shown stays
  }
  return tops.get(place);
}
