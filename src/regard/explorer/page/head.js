// The middle: the chosen head as lines, matrix or picture, with what is in focus and the controls of what is shown.

import { html, render, nothing } from "./vendor/lit-html.js";
import { state, redraw } from "./store.js";
import { chooseHead, chooseWindow, setOption, lockTokens } from "./actions.js";
import { describeHead, windowOf } from "./runs.js";
import { panes, placeIn, viewOf, focusOf, pairOf, isExact } from "./view.js";
import { Surface } from "./surface.js";
import { palette, isDark, LABELS } from "./colours.js";
import { layoutLines, locateLines, drawLines, drawLinesFocus } from "./lines.js";
import { layoutMatrix, locateMatrix, drawMatrix, drawMatrixFocus, cellBox } from "./matrix.js";
import { layoutPicture, locatePicture, drawPicture, drawPictureFocus } from "./picture.js";
import { strongest, sumOfRows, sumOfColumns } from "./tables.js";
import { exactNumber, shortNumber } from "./numbers.js";
import { quoted } from "./tokens.js";
import { showTip, hideTip } from "./tip.js";
import { savePicture, saveVector, saveTable, savePage } from "./save.js";

const DRAWERS = {
  lines: { layout: layoutLines, locate: locateLines, draw: drawLines, focus: drawLinesFocus, fades: true },
  matrix: { layout: layoutMatrix, locate: locateMatrix, draw: drawMatrix, focus: drawMatrixFocus },
  picture: { layout: layoutPicture, locate: locatePicture, draw: drawPicture, focus: drawPictureFocus, always: true },
};
const surfaces = new Map();
let pointer = null;

function isPair(view) {
  return view.place.kind === "cross";
}

function kindsShown(run) {
  if (state.view === "both") return ["lines", "matrix"];
  if (state.view !== "picture") return [state.view];
  const place = run.layers[placeIn(run).layer];
  return run.info.picture && place.queries === "tokens" && (place.grid ?? run.info.grid) ? ["picture", "matrix"] : ["matrix"];
}

function surfaceFor(kind, index) {
  const name = `${kind}-${index}`;
  if (!surfaces.has(name)) {
    const surface = new Surface(name, () => redraw("head"));
    Object.assign(surface, { kind, index });
    surface.over.setAttribute("role", "application");
    surface.over.addEventListener("pointermove", (event) => hovered(surface, event));
    surface.over.addEventListener("pointerleave", () => left());
    surface.over.addEventListener("click", (event) => clicked(surface, event));
    surfaces.set(name, surface);
  }
  return surfaces.get(name);
}

function placed(surface, event) {
  if (!surface.layout || !surface.view) return null;
  const box = surface.over.getBoundingClientRect();
  return DRAWERS[surface.kind].locate(surface.layout, surface.view, event.clientX - box.left, event.clientY - box.top);
}

function hovered(surface, event) {
  const place = placed(surface, event);
  pointer = { x: event.clientX, y: event.clientY, surface, place };
  surface.over.style.cursor = place ? "pointer" : "default";
  if (place?.window !== undefined) return state.hover ? left() : undefined;
  const same = place && state.hover && place.row === state.hover.row && place.column === state.hover.column;
  if (same || (!place && !state.hover)) return;
  state.hover = place;
  redraw("hover", "why");
}

function left() {
  pointer = null;
  if (!state.hover) return;
  state.hover = null;
  redraw("hover", "why");
}

// A click locks a token or a pair, a second click releases it; with Shift, Ctrl or ⌘ another token is added to the sum.
function clicked(surface, event) {
  const place = placed(surface, event);
  if (!place) return release();
  if (place.window !== undefined) return chooseWindow(place.window);
  const { view } = surface;
  const tokens = {
    rows: place.row >= 0 ? [view.rowGroups[place.row].tokens[0]] : [],
    columns: place.column >= 0 ? [view.columnGroups[place.column].tokens[0]] : [],
  };
  toggleLock(tokens, event.shiftKey || event.ctrlKey || event.metaKey);
}

function toggleLock({ rows, columns }, add) {
  const lock = state.locked;
  const same = lock && String(lock.rows) === String(rows) && String(lock.columns) === String(columns);
  if (!add || !lock) return same ? release() : lockTokens(rows, columns);
  const merged = (old, more) => {
    const kept = old.filter((token) => !more.includes(token));
    return kept.length < old.length ? kept : [...old, ...more];
  };
  // Sums are over queries or over keys: what is added decides where both are possible.
  if (lock.rows.length && rows.length) return lockTokens(merged(lock.rows, rows), []);
  if (lock.columns.length && columns.length) return lockTokens([], merged(lock.columns, columns));
  return lockTokens([...lock.rows, ...rows], [...lock.columns, ...columns]);
}

export function release() {
  state.step = null;
  if (state.locked) lockTokens([], []);
}

// Moves the pair in focus by arrow keys; Enter locks it.
export function moveFocus(down, across) {
  const [first] = panes();
  const view = first && viewOf(first.run);
  if (!view) return;
  const from = pairOf(view, state.locked ? focusOf(view) : state.hover ? focusOf(view) : null) ?? { row: 0, column: 0 };
  const row = Math.min(view.rows - 1, Math.max(0, from.row + down)), column = Math.min(view.columns - 1, Math.max(0, from.column + across));
  if (state.locked) lockTokens([view.rowGroups[row].tokens[0]], [view.columnGroups[column].tokens[0]]);
  pointer = null;
  state.hover = { row, column };
  redraw("hover", "why");
}

export function lockFocus() {
  const [first] = panes();
  const view = first && viewOf(first.run);
  if (!view) return;
  if (state.locked) return release();
  const pair = pairOf(view, focusOf(view));
  if (pair) lockTokens([view.rowGroups[pair.row].tokens[0]], [view.columnGroups[pair.column].tokens[0]]);
}

export function drawHead() {
  const shown = panes();
  const element = document.getElementById("head");
  if (!shown.length || !state.opened) {
    render(html`<p class="empty">${state.error ? "Nothing to show yet: choose a model and a text above, then Run." : "Reading the model and its text…"}</p>`, element);
    return;
  }
  const place = state.run.layers[state.layer];
  const picture = state.run.info.kind === "image";
  const kinds = kindsShown(state.run);
  render(html`
    <div class="heading">${title(place, shown.length > 1)}<span class="push"></span>${saves()}</div>
    <div class="tools" role="toolbar" aria-label="What is shown">${heads(place)}${windowsOf(place)}${tools(place, picture, kinds)}</div>
    <div class=${`panes ${shown.length > 1 ? "two" : "one"} ${kinds.length > 1 ? "both" : "single"} ${kinds[0] === "picture" ? "pictured" : place.rows > 80 ? "lengthy" : ""}`}>
      ${shown.map((pane, index) => html`${pane.title ? html`<div class="panetitle" data-pane=${index}>${pane.title}<span class="panefacts">${factsOf(pane.run)}</span></div>` : nothing}`)}
      ${(shown.length > 1 ? [...kinds].reverse() : kinds).map((kind) => shown.map((_, index) => html`<div class=${`pane ${kind}`}>${surfaceFor(kind, index).element}</div>`))}
    </div>
    <div class="below"><div id="words" class="words"></div>${legend()}</div>`, element);
  shown.forEach((pane, index) => kinds.forEach((kind) => drawSurface(surfaceFor(kind, index), pane.run)));
  drawHover();
}

// Beside another run each pane has its own label and entropy.
function title(place, beside) {
  const { label, strength, entropy } = statistics(place);
  const known = LABELS[label];
  const heading = html`<h1 id="title">${capital(describeHead(place, state.head))}</h1>`;
  if (beside) return heading;
  return html`${heading}
    ${known ? html`<span class="chip" data-label=${label} title=${`${label}: attends to ${known.words}; 1 is all weight, 0 is chance`}><b class="letter">${known.letter}</b>${label} ${shortNumber(strength)}</span>` : nothing}
    ${entropy !== null && entropy !== undefined ? html`<span class="quiet" title="Entropy of a query's weights, in nats, on average: 0 is one key, ln(keys) is all alike">entropy ${shortNumber(entropy)}</span>` : nothing}
    ${state.run === state.base ? nothing : html`<span class="quiet" id="unchanged">before: ${factsOf(state.base)}</span>`}`;
}

// Label and entropy of the chosen head in a run, in words.
function factsOf(run) {
  const { layer } = placeIn(run);
  const { label, strength, entropy } = statistics(run.layers[layer]);
  return [label && `${label} ${shortNumber(strength)}`, entropy !== null && entropy !== undefined && `entropy ${shortNumber(entropy)}`].filter(Boolean).join(" · ");
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function statistics(place) {
  if (typeof state.head !== "number") return {};
  return { label: place.labels?.[state.head], strength: place.strength?.[state.head], entropy: place.entropy?.[state.head] };
}

function heads(place) {
  const at = typeof state.head === "number" ? state.head : 0;
  const other = (name, words, hint) => html`<button data-head=${name} aria-pressed=${state.head === name} title=${hint} @click=${() => chooseHead(state.layer, state.head === name ? 0 : name)}>${words}</button>`;
  return html`<span class="group" role="group" aria-label="Head">
    <button id="previous" title="The head before ( [ )" aria-label="Previous head" @click=${() => stepHead(-1)}>‹</button>
    <button id="next" title="The next head ( ] )" aria-label="Next head" @click=${() => stepHead(1)}>›</button>
    ${place.heads > 1 ? html`${other("mean", "mean", "Mean over the heads of this layer")}${other("max", "max", "Maximum over the heads of this layer")}` : nothing}
    ${state.live && rollsOut() && place.kind === "self" && (!state.run.info.sources || place.side === "encoder") ? other("rollout", "rollout", "Attention followed through all layers (Abnar and Zuidema 2020)") : nothing}
  </span>`;
}

// Rollout multiplies the weights of all layers, which must be between the same tokens.
function rollsOut() {
  return state.run.layers.every((layer) => layer.queries !== "channels" && !layer.windows);
}

function windowsOf(place) {
  if (!place.windows || !state.live) return nothing;
  const window = windowOf(place);
  return html`<span class="group" role="group" aria-label="Window of the picture"><button id="windowbefore" aria-label="Previous window" @click=${() => chooseWindow(window - 1)}>‹</button><span class="windowname">window ${window + 1} of ${place.windows[0] * place.windows[1]}</span><button id="windowafter" aria-label="Next window" @click=${() => chooseWindow(window + 1)}>›</button></span>`;
}

export function stepHead(step) {
  const { layers } = state.run;
  let head = (typeof state.head === "number" ? state.head : step > 0 ? -1 : layers[state.layer].heads) + step;
  let { layer } = state;
  if (head < 0) {
    layer = (layer - 1 + layers.length) % layers.length;
    head = layers[layer].heads - 1;
  } else if (head >= layers[layer].heads) {
    layer = (layer + 1) % layers.length;
    head = 0;
  }
  chooseHead(layer, head);
}

function saves() {
  const view = () => panes().map((pane) => ({ ...pane, view: viewOf(pane.run) }));
  return html`<span class="group" role="group" aria-label="Save">
    <button data-save="png" title="Save the picture as PNG" @click=${() => savePicture([...surfaces.values()].filter((surface) => surface.element.isConnected))}>PNG</button>
    <button data-save="svg" title="Save lines and matrix as SVG" @click=${() => saveVector(view())}>SVG</button>
    <button data-save="csv" title="Save the weights that are shown as CSV" @click=${() => saveTable(view())}>CSV</button>
    ${state.live ? html`<button data-save="html" title="Save everything as one page that opens anywhere; with Shift: all weights" @click=${(event) => savePage(event.shiftKey)}>HTML</button>` : nothing}
  </span>`;
}

function tools(place, picture, kinds) {
  const chosen = state.view === "picture" && !kinds.includes("picture") ? "matrix" : state.view; // channels have no places in a picture
  const view = (name, words) => html`<button data-view=${name} aria-pressed=${chosen === name} @click=${() => setOption("view", name)}>${words}</button>`;
  const check = (name, words, hint, shown = true) => shown ? html`<label title=${hint}><input type="checkbox" data-option=${name} .checked=${state[name]} @change=${(event) => setOption(name, event.target.checked)}>${words}</label>` : nothing;
  const { info } = state.run;
  const pieces = !picture && new Set((info.words ?? []).filter((word) => word !== null)).size < (info.words ?? []).filter((word) => word !== null).length;
  const special = (info.special ?? []).some(Boolean) || (info.source_special ?? []).some(Boolean);
  return html`
    <span class="group" role="group" aria-label="View">${picture ? view("picture", "picture") : nothing}${view("both", picture ? "lines + matrix" : "both")}${view("lines", "lines")}${view("matrix", "matrix")}</span>
    <span class="push"></span>${lockButton()}<i class="break"></i>
    ${check("words", "whole words", "Merge word pieces: the sum over a word's keys, the mean over its queries", pieces || (info.source_words && !picture))}
    ${check("special", "hide special", "Leave out special tokens such as [CLS] and </s>; weights are not rescaled", special)}
    ${check("alignment", "alignment", "Mark each query's strongest key", place.kind === "cross")}
    ${check("contrast", "contrast", "Colour from 0 to the largest weight shown, instead of 0 to 1")}
    <label title="Weights below this are not drawn">hide below <input id="threshold" type="range" min="0" max="0.5" step="0.01" .value=${String(state.threshold)} @input=${(event) => setOption("threshold", Number(event.target.value))}><output>${state.threshold ? state.threshold.toFixed(2) : "0"}</output></label>
    <label title="Only so many keys per query are drawn">top <select id="topk" .value=${String(state.top)} @change=${(event) => setOption("top", Number(event.target.value))}>${[0, 1, 2, 3, 5, 10, 20].map((most) => html`<option value=${most} ?selected=${state.top === most}>${most || "all"}</option>`)}</select></label>`;
}

function lockButton() {
  const lock = state.locked;
  const amount = lock ? Math.max(lock.rows.length, lock.columns.length) : 0;
  return html`<button id="lock" class=${lock ? "on" : ""} aria-pressed=${Boolean(lock)} title=${lock ? "Release what is locked (Esc)" : "Click a token or a cell to lock it; Shift-click adds another"} @click=${lockFocus}>
    <svg viewBox="0 0 16 16" width="13" height="13" aria-hidden="true"><path d=${lock ? "M4.5 7V5a3.5 3.5 0 0 1 7 0v2" : "M4.5 7V4.5a3.5 3.5 0 0 1 6.6-1.6"} fill="none" stroke="currentColor" stroke-width="1.7"/><rect x="3" y="7" width="10" height="7.5" rx="1.5" fill="currentColor"/></svg>
    ${lock ? (amount > 1 ? `release ${amount}` : "release") : "lock"}</button>`;
}

function legend() {
  const most = panes().map((pane) => viewOf(pane.run)?.most ?? 1).reduce((a, b) => Math.max(a, b), 0);
  return html`<div class="legend" aria-label="Colours: weight, from 0 to ${exactNumber(most)}; hatched means masked"><span>0</span><i class="ramp"></i><span>${shortNumber(most, most < 0.1 ? 3 : 2)}</span><i class="hatch"></i><span>masked</span></div>`;
}

function drawSurface(surface, run) {
  const view = viewOf(run);
  const colours = palette(isDark(state.theme));
  const drawer = DRAWERS[surface.kind];
  surface.view = view;
  if (!view) {
    surface.data();
    surface.overlay();
    surface.drawnFor = null;
    return;
  }
  const alignment = state.alignment && isPair(view);
  const signature = [surface.width, surface.height, devicePixelRatio, colours.ground, alignment].join();
  if (surface.drawnFor === view && surface.signature === signature) return;
  const context = surface.data();
  if (!context) return;
  surface.layout = drawer.layout(context, surface.width, surface.height, view);
  drawer.draw(context, surface.layout, view, colours, surface.kind === "picture" ? () => { surface.drawnFor = null; redraw("head"); } : alignment);
  Object.assign(surface, { drawnFor: view, signature });
}

// Only what follows the pointer: overlays, the line of words, the tooltip.
export function drawHover() {
  const shown = panes();
  if (!shown.length || !state.opened) return;
  const colours = palette(isDark(state.theme));
  let first = null;
  shown.forEach((pane, index) => kindsShown(state.run).forEach((kind) => {
    const surface = surfaceFor(kind, index);
    const { view } = surface;
    const context = surface.overlay();
    if (!view || !context || !surface.layout) return;
    const focus = focusOf(view);
    if (pane.run === state.run) first = { view, focus };
    const drawer = DRAWERS[kind];
    surface.base.style.opacity = drawer.fades && focus ? "0.13" : "1";
    if (focus || drawer.always) drawer.focus(context, surface.layout, view, colours, focus);
    surface.describe(`${kind === "lines" ? "Tokens with lines" : kind === "matrix" ? "Matrix of weights" : "Picture"}: ${describeHead(view.place, view.head)}. Arrows move, Enter locks, Escape releases.`);
  }));
  if (first) words(first.view, first.focus);
  tooltip(shown);
}

function listed(view, focus) {
  const byRow = focus.rows.length > 0;
  const sums = byRow ? sumOfRows(view.table, focus.rows) : sumOfColumns(view.table, focus.columns);
  const [own, other] = byRow ? [view.rowGroups, view.columnGroups] : [view.columnGroups, view.rowGroups];
  const chosen = byRow ? focus.rows : focus.columns;
  const texts = chosen.slice(0, 4).map((index) => own[index].text);
  const best = strongest(sums, 5).filter((index) => Math.abs(sums[index]) >= 0.0005).map((index) => ({ text: other[index].text, weight: sums[index] }));
  return { byRow, texts, more: chosen.length - texts.length, best, many: chosen.length > 1 };
}

let saying = 0;

function words(view, focus) {
  const place = document.getElementById("words");
  if (!place) return;
  if (!focus) {
    const kind = view.preview ? "A preview; exact numbers come." : state.live ? "" : "≈ marks numbers stored in 8 bits.";
    render(html`<span class="quiet">${kind} Point at a cell; click to lock it, Shift-click to sum several.</span>`, place);
    return;
  }
  const { byRow, texts, more, best, many } = listed(view, focus);
  const verb = byRow ? (many ? "attend to (sum)" : "attends to") : many ? "get weight from (sum)" : "gets weight from";
  render(html`<b>${texts.map((text, index) => html`${index ? " + " : ""}<bdi>${text}</bdi>`)}${more > 0 ? ` + ${more}` : ""}</b> ${verb}
    ${best.map(({ text, weight }) => html`<span class="partner"><bdi>${text}</bdi> ${shortNumber(weight, 3)}</span>`)}${best.length ? nothing : "nothing it may see"}`, place);
  clearTimeout(saying);
  saying = setTimeout(() => {
    document.getElementById("spoken").textContent = `${texts.map(quoted).join(" and ")} ${verb} ${best.map(({ text, weight }) => `${quoted(text)} ${shortNumber(weight, 3)}`).join(", ")}`;
  }, 400);
}

function tooltip(shown) {
  if (!pointer?.place || !state.hover) return hideTip();
  const { row, column } = pointer.place;
  const { view } = pointer.surface;
  if (!view) return hideTip();
  if (row < 0 || column < 0) {
    const group = row >= 0 ? view.rowGroups[row] : view.columnGroups[column];
    if (!group) return hideTip();
    const names = row >= 0 ? "queries" : "keys";
    return showTip(html`<b><bdi>${group.text}</bdi></b> <span class="quiet">${names === "queries" ? "query" : "key"} ${group.tokens.length > 1 ? `${group.tokens[0]}–${group.tokens[group.tokens.length - 1]}` : group.tokens[0]}</span>`, pointer.x, pointer.y);
  }
  const lines = shown.map((pane) => {
    const own = viewOf(pane.run);
    return own && row < own.rows && column < own.columns ? { title: pane.title, value: cellWords(own, row, column) } : null;
  }).filter(Boolean);
  showTip(html`<div><bdi>${view.rowGroups[row]?.text}</bdi> → <bdi>${view.columnGroups[column]?.text}</bdi></div>
    ${lines.map((line) => html`<div class="figure"><b>${line.value}</b> <span class="quiet">${line.title}</span></div>`)}
    <div class="quiet">query ${view.rowGroups[row]?.tokens[0]}, key ${view.columnGroups[column]?.tokens[0]}</div>`, pointer.x, pointer.y);
}

function cellWords(view, row, column) {
  const index = row * view.columns + column;
  if (!view.table.visible[index]) return "masked: this query may not see the key";
  return `${isExact(view, row, column) ? "" : "≈ "}${exactNumber(view.table.weights[index])}`;
}

// For tests and scripts: the box of a cell of the matrix on the screen.
export function cellOnScreen(row, column, pane = 0) {
  const surface = surfaces.get(`matrix-${pane}`);
  if (!surface?.layout) return null;
  const box = surface.over.getBoundingClientRect();
  const cell = cellBox(surface.layout, row, column);
  return { x: box.left + cell.x, y: box.top + cell.y, width: cell.width, height: cell.height };
}
