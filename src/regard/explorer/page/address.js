// The state in the page's address, after #: a link shows what its sender saw.

import { state } from "./store.js";

const FLAGS = ["words", "special", "contrast"];
const CHOICES = { sort: ["layer", "label", "entropy", "effect"], view: ["both", "lines", "matrix", "picture"], scope: ["head", "layer", "model"], costUnit: ["flops", "bytes"] };

function headFrom(text) {
  return ["mean", "max", "rollout"].includes(text) ? text : Math.max(0, parseInt(text, 10) || 0);
}

function parsed(text, otherwise) {
  try {
    return JSON.parse(text) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// Whether the address names a model or a head; what it holds goes into the state.
export function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  if (fields.has("model")) state.model = fields.get("model");
  for (const kind of ["text", "source", "image"]) {
    if (!fields.has(kind)) continue;
    state.input = { [kind]: fields.get(kind) };
    if (kind === "source") state.input.target = fields.get("target");
  }
  for (const flag of FLAGS) if (fields.has(flag)) state[flag] = fields.get(flag) === "1";
  if (fields.has("alignment")) state.alignment = fields.get("alignment") === "1";
  for (const [name, choices] of Object.entries(CHOICES)) if (choices.includes(fields.get(name))) state[name] = fields.get(name);
  state.threshold = Math.min(1, Math.max(0, parseFloat(fields.get("threshold")) || 0));
  state.top = Math.max(0, parseInt(fields.get("top"), 10) || 0);
  const compare = fields.get("compare");
  if (["twin", "mechanism", "text", "before"].includes(compare)) state.compare = { kind: compare, value: fields.get("with") ?? "" };
  const changes = parsed(fields.get("changes"), []);
  state.changes = Array.isArray(changes) ? changes.filter((change) => change && typeof change === "object") : [];
  const lock = parsed(fields.get("lock"), null);
  const places = (list) => (Array.isArray(list) ? list.filter((place) => Number.isInteger(place) && place >= 0) : []);
  if (lock) state.locked = { rows: places(lock.rows), columns: places(lock.columns) };
  if (state.locked && !state.locked.rows.length && !state.locked.columns.length) state.locked = null;
  if (!fields.has("layer")) return false;
  state.layer = Math.max(0, parseInt(fields.get("layer"), 10) || 0);
  state.window = fields.has("window") ? Math.max(0, parseInt(fields.get("window"), 10) || 0) : null;
  state.head = headFrom(fields.get("head"));
  return true;
}

let written = "";

export function writeAddress() {
  if (!state.live || !state.base) return;
  const fields = new URLSearchParams();
  fields.set("model", state.model);
  for (const [name, value] of Object.entries(state.input)) {
    if (typeof value === "string" && value.length < 20000) fields.set(name, value);
  }
  fields.set("layer", state.layer);
  fields.set("head", state.head);
  if (state.window !== null) fields.set("window", state.window);
  if (state.locked) fields.set("lock", JSON.stringify(state.locked));
  for (const flag of FLAGS) if (state[flag]) fields.set(flag, "1");
  if (!state.alignment) fields.set("alignment", "0");
  if (state.threshold) fields.set("threshold", state.threshold);
  if (state.top) fields.set("top", state.top);
  if (state.view !== "both") fields.set("view", state.view);
  if (state.sort !== "layer") fields.set("sort", state.sort);
  if (state.scope !== "head") fields.set("scope", state.scope);
  if (state.costUnit !== "flops") fields.set("costUnit", state.costUnit);
  if (state.compare.kind !== "none") fields.set("compare", state.compare.kind);
  if (state.compare.value) fields.set("with", state.compare.value);
  if (state.changes.length) fields.set("changes", JSON.stringify(state.changes));
  written = `#${fields}`;
  if (state.lab) return; // the lab's page has the address
  try {
    history.replaceState(null, "", written);
  } catch {
    // A sandboxed frame has no address of its own.
  }
}

// Where the model was left, for the way back from the lab.
export function addressOfModel() {
  return written || "#";
}

// Whether the address was changed by someone else: a link that was pasted, or Back.
export function addressIsForeign() {
  return location.hash !== written && location.hash.length > 1;
}
