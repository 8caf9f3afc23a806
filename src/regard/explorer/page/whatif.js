// The What if card: beta, mechanism, silenced heads, hidden tokens; and what becomes of the output.

import { html, render, nothing } from "./vendor/lit-html.js";
import { state, redraw, mechanismTitle } from "./store.js";
import { change, changed, applyChanges, compareWith, topAt } from "./actions.js";
import { headScores, describeHead } from "./runs.js";
import { axisOf, readable } from "./tokens.js";
import { exactNumber, percent } from "./numbers.js";

const MIDDLE = 100, END = 200, DECADE = 50; // places of the dial: a decade of beta each 50

// The dial's place is logarithmic about the model's own scale; its ends are uniform (0) and argmax (infinity).
function betaAt(place, scale) {
  if (place <= 0) return 0;
  return place >= END ? Infinity : scale * 10 ** ((place - MIDDLE) / DECADE);
}

function placeOf(beta, scale) {
  if (beta === null || beta === undefined) return MIDDLE;
  if (beta === "inf" || beta === Infinity) return END;
  return beta === 0 ? 0 : Math.round(Math.min(END - 1, Math.max(1, MIDDLE + DECADE * Math.log10(beta / scale))));
}

// The beta of the model's own mechanism: 1/√K as a rule, 0 or "inf" at the ends, null where it has none.
function ownBeta() {
  return state.base.layers[state.layer]?.mechanism?.scale ?? null;
}

function isScale(beta) {
  return Number.isFinite(beta) && beta > 0;
}

// The beta in the dial's middle.
function scaleHere() {
  if (isScale(ownBeta())) return ownBeta();
  const found = typeof state.head === "number" ? headScores(state.run, state.layer, state.head)?.scale : null;
  return isScale(found) ? found : 0.125;
}

function dragged(event) {
  state.beta = betaAt(Number(event.target.value), scaleHere());
  redraw("head", "whatif");
}

function released(event) {
  const place = Number(event.target.value);
  const beta = betaAt(place, scaleHere());
  change("beta", place === placeOf(ownBeta(), scaleHere()) ? null : beta === Infinity ? "inf" : beta);
}

export function drawWhatif() {
  const element = document.getElementById("whatif");
  if (!state.live) {
    render(html`<h2>What if</h2><p class="empty">Changing attention runs the model again. Start the live page: <code>regard view</code></p>${state.opened ? output() : nothing}`, element);
    return;
  }
  if (!state.opened) {
    render(html`<h2>What if</h2><p class="empty">Change the attention of a head, and see what becomes of the output.</p>`, element);
    return;
  }
  const scope = (name, words) => html`<button data-scope=${name} aria-pressed=${state.scope === name} @click=${() => { state.scope = name; redraw("whatif"); }}>${words}</button>`;
  const single = typeof state.head === "number";
  render(html`
    <h2>What if <span class="group push" role="group" aria-label="Where">${scope("head", single ? "this head" : "these heads")}${scope("layer", "layer")}${scope("model", "model")}</span></h2>
    ${dial(single)}
    <div class="row"><select id="mechanism" aria-label="Another mechanism" title="The same q, k and v through another mechanism" ?disabled=${state.run.layers[state.layer].queries === "channels"} @change=${swapped}>
      <option value="" ?selected=${!changed("mechanism")}>the model’s own mechanism</option>
      ${state.mechanisms.filter(fitting).map((mechanism) => html`<option value=${mechanism.name} ?selected=${changed("mechanism") === mechanism.name} title=${mechanism.formula ?? ""}>${mechanism.title}</option>`)}</select>${windowBox()}</div>
    <div class="row buttons">${toggle("silence", "silence", "The output of these heads becomes 0")}${toggle("mean", "mean", "Each query gets the mean of the output over all tokens")}${hide()}</div>
    ${chips()}${output()}`, element);
}

function fitting(mechanism) {
  return state.run.layers[state.layer].causal || !mechanism.causal;
}

// The mechanisms of the chosen heads, with the changes.
function mechanismsNow() {
  const { mechanism, head_mechanisms: mechanisms } = state.run.layers[state.layer];
  if (!mechanisms) return mechanism ? [mechanism] : [];
  return typeof state.head === "number" ? [mechanisms[state.head]] : mechanisms;
}

function dial(single) {
  const now = mechanismsNow();
  const turns = now.every((mechanism) => mechanism.family === "softmax"); // others have no beta
  const scale = scaleHere();
  const length = state.base.layers[state.layer].qk_length;
  const middle = !length || Math.abs(scale * Math.sqrt(length) - 1) < 1e-3 ? "1/√K" : "the model’s";
  const beta = state.beta ?? changed("beta") ?? now[0]?.scale ?? scale;
  const place = placeOf(beta, scale);
  const value = beta === "inf" ? Infinity : beta;
  return html`<div class="dial"><label for="beta">β <output id="betavalue">${turns ? exactNumber(value === Infinity ? Infinity : Number(value.toPrecision(4))) : "–"}</output></label>
    <input id="beta" type="range" min="0" max=${END} step="1" list="marks" .value=${String(place)} ?disabled=${!turns} title=${turns ? "Drag: the matrix follows at once. Let go: the model runs again." : "This mechanism has no beta"}
      aria-label="Beta, from uniform over the model's own scale to argmax" aria-valuetext=${value === 0 ? "uniform" : value === Infinity ? "argmax" : exactNumber(value)}
      @pointerdown=${() => single && headScores(state.run, state.layer, state.head)} @focus=${() => single && headScores(state.run, state.layer, state.head)}
      @input=${dragged} @change=${released} @dblclick=${() => change("beta", null)}>
    <div class="ends"><span>uniform</span><span>${middle}</span><span>argmax</span></div></div>`;
}

async function swapped(event) {
  const name = event.target.value || null;
  if (name && state.compare.kind === "none") state.compare = { kind: "before", value: "" };
  await change("mechanism", name, name === "window" ? { window: 4 } : {});
}

// How far softmax within a window looks.
function windowBox() {
  if (changed("mechanism") !== "window") return nothing;
  return html`<label class="quiet">± <input id="window" type="number" min="0" max="9999" .value=${String(changed("mechanism", "window") ?? 8)} aria-label="Tokens on each side" title="How many tokens away a key may be" @change=${(event) => change("mechanism", "window", { window: Math.max(0, Math.round(Number(event.target.value)) || 0) })}></label>`;
}

function toggle(kind, words, hint) {
  const on = Boolean(changed(kind));
  return html`<button data-change=${kind} aria-pressed=${on} title=${hint} @click=${() => change(kind, on ? null : true)}>${words}</button>`;
}

function tokenToHide() {
  const lock = state.locked;
  if (state.run.layers[state.layer].windows) return []; // it would be hidden in every window
  return lock?.columns.length ? lock.columns : lock?.rows.length && state.run.layers[state.layer].queries === state.run.layers[state.layer].keys ? lock.rows : [];
}

function hide() {
  const positions = tokenToHide();
  const names = axisOf(state.run, state.layer, "keys").names;
  const words = positions.slice(0, 2).map((position) => readable(names[position] ?? "")).join(", ");
  return html`<button id="hide" ?disabled=${!positions.length} title=${positions.length ? "No query may attend to this token" : "Lock a token first: click it"} @click=${() => change("hide", positions)}>hide ${positions.length ? html`<bdi>${words}</bdi>` : "token"}</button>`;
}

function chips() {
  if (!state.changes.length) return nothing;
  return html`<div class="changes">${state.changes.map((each, index) => html`<span class="chip change"><span title=${changeWords(each)}>${changeWords(each)}</span><button aria-label=${`Take back: ${changeWords(each)}`} title="Take back" @click=${() => applyChanges(state.changes.filter((_, other) => other !== index))}>×</button></span>`)}
    <button id="clear" class="link" @click=${() => applyChanges([])}>undo all</button>${state.compare.kind === "none" ? html`<button id="before" class="link" @click=${() => compareWith("before")}>side by side</button>` : nothing}</div>`;
}

function changeWords(each) {
  const layer = each.layers ? state.base.layers.find((candidate) => candidate.index === each.layers[0]) : null;
  const where = !layer ? "all heads" : describeHead(layer, each.heads ? each.heads[0] : "all").replace(/, head all$/, "");
  if ("beta" in each) return `β ${each.beta === "inf" ? "∞" : exactNumber(Number(each.beta.toPrecision(3)))} · ${where}`;
  if ("mechanism" in each) return `${mechanismTitle(each.mechanism)}${"window" in each ? ` ± ${each.window}` : ""} · ${where}`;
  if ("hide" in each) {
    const names = layer ? axisOf(state.base, layer.position, "keys").names : state.base.info.tokens;
    return `hidden: ${each.hide.map((position) => readable(names[position] ?? String(position))).join(", ")} · ${where}`;
  }
  return `${each.silence ? "silenced" : "mean"} · ${where}`;
}

// The output's five likeliest tokens, before and after; where a model has none, how far its output has moved.
function output() {
  const position = chosenPosition();
  const before = topAt(state.base, position), after = topAt(state.run, position);
  const isChanged = state.run !== state.base;
  const { done } = state.run;
  if (!done) return nothing;
  const moved = html`<p class="moved">${!isChanged ? nothing : html`
    ${done.divergence === null || done.divergence === undefined ? nothing : html`<span>KL <b id="kl">${exactNumber(done.divergence)}</b> nats</span>`}
    ${done.distance === null || done.distance === undefined ? nothing : html`<span>output moved <b id="moved">${percent(done.distance)}</b></span>`}`}</p>`;
  const written = done.text ? html`<p class="written" id="written" title=${done.text}>${isChanged && state.base.done?.text !== done.text ? html`<s><bdi>${state.base.done?.text}</bdi></s> ` : nothing}<bdi>${done.text}</bdi></p>` : nothing;
  if (!before?.length || !after?.length) return html`${moved}${written}${isChanged || done.text || !state.live ? nothing : html`<p class="quiet tight">This model has no word predictions: the card will say how far its output moves.</p>`}`;
  const rows = after.map((entry) => ({ ...entry, before: before.find((other) => other.id === entry.id)?.probability ?? null }));
  const gone = before.filter((entry) => !after.some((other) => other.id === entry.id));
  return html`
    <table id="topfive"><caption class="unseen">The likeliest outputs</caption><thead><tr><th scope="col">${outputTitle(position)}</th><th scope="col">${isChanged ? "before" : ""}</th><th scope="col">${isChanged ? "after" : ""}</th></tr></thead>
    <tbody>${rows.map((entry) => html`<tr data-token=${entry.id}><td><bdi>${readable(entry.token)}</bdi></td><td>${isChanged ? (entry.before === null ? "–" : percent(entry.before)) : nothing}</td><td><meter min="0" max="1" .value=${entry.probability} aria-hidden="true"></meter>${percent(entry.probability)}</td></tr>`)}
    ${isChanged ? gone.slice(0, 2).map((entry) => html`<tr class="gone"><td><s><bdi>${readable(entry.token)}</bdi></s></td><td>${percent(entry.probability)}</td><td>below</td></tr>`) : nothing}</tbody></table>${moved}${written}`;
}

function chosenPosition() {
  const lock = state.locked;
  return state.run.info.kind !== "image" && lock?.rows.length === 1 && state.run.layers[state.layer].queries === "tokens" ? lock.rows[0] : null;
}

function outputTitle(position) {
  if (state.run.info.kind === "image") return "class";
  const at = position ?? state.run.done.position;
  const name = state.run.info.tokens[at];
  return name === undefined ? "output" : html`${state.run.layers.some((layer) => layer.causal) ? "after" : "at"} <bdi>${readable(name)}</bdi>`;
}
