// The bottom: a generation step by step, with the alternatives of each; choosing one goes on from there.

import { html, render } from "./vendor/lit-html.js";
import { state, redraw } from "./store.js";
import { generateSteps, chooseStep } from "./actions.js";
import { readable } from "./tokens.js";
import { roundPercent } from "./numbers.js";

function canGenerate() {
  const info = state.base?.info;
  if (!state.live || !info || info.kind === "image") return false;
  return info.generates ?? (info.kind === "pair" || state.base.layers.some((layer) => layer.causal));
}

export function drawSteps() {
  const element = document.getElementById("steps");
  const shown = canGenerate();
  element.hidden = !shown;
  if (!shown) return;
  element.classList.toggle("idle", !state.steps.length);
  render(html`
    <div class="stephead"><h2>Generation</h2>
      <label>tokens <input id="count" type="number" min="1" max="64" .value=${String(state.count)} @change=${(event) => { state.count = Math.min(64, Math.max(1, Math.round(Number(event.target.value)) || 12)); redraw("steps"); }}></label>
      <button id="generate" class="primary small" ?disabled=${Boolean(state.busy)} @click=${() => generateSteps()}>${state.steps.length ? "Again" : "Generate"}</button></div>
    <div class="steplist" role="list">
      ${state.steps.length ? state.steps.map((step, index) => column(step, index)) : html`<p class="empty">${hint()}</p>`}
    </div>`, element);
}

function hint() {
  return state.base.info.kind === "pair"
    ? "Write the translation token by token: each step shows what it attends to, and what else the model could have written."
    : "Let the model go on from the text: each step shows what it attends to, and what else it could have written.";
}

function column(step, index) {
  const chosen = state.step === index;
  return html`<div class=${`step ${chosen ? "chosen" : ""}`} role="listitem">
    <button class="token" data-step=${index} aria-pressed=${chosen} title="Show what this step attended to" @click=${() => chooseStep(index)}><bdi>${readable(step.token)}</bdi><span class="quiet">${roundPercent(step.probability)}</span></button>
    ${(step.alternatives ?? []).filter((other) => other.id !== step.id).slice(0, 4).map((other) => html`<button class="other" data-alternative=${other.id} title=${`Go on from here with “${readable(other.token)}”`} ?disabled=${Boolean(state.busy)} @click=${() => goOn(index, other)}><bdi>${readable(other.token)}</bdi><span class="quiet">${roundPercent(other.probability)}</span></button>`)}
  </div>`;
}

function goOn(index, other) {
  generateSteps([...state.steps.slice(0, index).map((step) => step.id), other.id]);
}
