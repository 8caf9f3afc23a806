// The Why card: from q and k to the weight of the pair in focus, number by number, and what its value adds.

import { html, render, nothing } from "./vendor/lit-html.js";
import { state, redraw, awaited } from "./store.js";
import { why } from "./actions.js";
import { panes, viewOf, focusOf, pairOf, tokenPair } from "./view.js";
import { palette, isDark } from "./colours.js";
import { cleared, FONT } from "./surface.js";
import { exactNumber, shortNumber, percent } from "./numbers.js";
import { axisOf, readable } from "./tokens.js";

const PAUSE = 90; // ms that the pointer rests before the server is asked
const answers = new Map();
const bars = document.createElement("canvas");
bars.className = "bars";
bars.setAttribute("role", "img");
let asked = null;
let latest = null; // stays on the card while the next answer is on its way

function wanted() {
  const shown = panes();
  const pane = shown.find((each) => each.run === state.run);
  const view = pane && state.opened && viewOf(pane.run);
  if (!view || view.preview) return null;
  const pair = pairOf(view, focusOf(view));
  const tokens = pair && tokenPair(view, pair);
  return tokens && { view, ...tokens, place: [state.run.id, view.layer, view.head, tokens.query, tokens.key].join("/") };
}

function askWhy(pair) {
  if (asked?.place === pair.place) return;
  asked?.control.abort();
  const control = new AbortController();
  asked = { place: pair.place, control };
  awaited(answered(pair, control.signal, state.locked || !latest ? 0 : PAUSE));
}

async function answered(pair, signal, pause) {
  await new Promise((resolve) => setTimeout(resolve, pause));
  if (signal.aborted) return;
  try {
    answers.set(pair.place, await why(pair.query, pair.key, signal));
  } catch (problem) {
    if (problem.name === "AbortError") return;
    answers.set(pair.place, { problem: problem.message });
  }
  if (answers.size > 200) answers.delete(answers.keys().next().value);
  redraw("why");
}

export function drawWhy() {
  const element = document.getElementById("why");
  const say = (words) => render(html`<h2>Why</h2><p class="empty">${words}</p>`, element);
  if (!state.live) return say(html`q, k and the steps to a weight are computed when asked for. Start the live page: <code>regard view</code>`);
  if (!state.opened) return say("The numbers behind a weight appear here.");
  if (typeof state.head !== "number") return say("A mean, maximum or rollout has no q and k of its own. Choose one head to see why.");
  const pair = wanted();
  if (!pair) return latest ? undefined : say("Reading…");
  const answer = answers.get(pair.place);
  if (!answer) askWhy(pair);
  else latest = { pair, answer };
  if (!latest) return say("Reading…");
  if (latest.answer.problem) return say(latest.answer.problem);
  whyCard(element, latest, Boolean(answer));
}

function tokenText(view, side, index) {
  const axis = axisOf(state.run, view.layer, side);
  return readable(axis.names[index] ?? String(index));
}

function whyCard(element, { pair, answer }, current) {
  const { q, k, steps, weight, share } = answer;
  render(html`
    <h2>Why <span class="pair"><bdi>${tokenText(pair.view, "queries", pair.query)}</bdi> → <bdi>${tokenText(pair.view, "keys", pair.key)}</bdi></span><output id="weight" class="push">${exactNumber(weight)}</output></h2>
    <div class=${current ? "" : "stale"}>
    <div class="barbox">${bars}</div>
    <ol class="chain">${steps.map((step, index) => html`<li data-step=${step.name} class=${index === steps.length - 1 ? "last" : ""}><span class="formula">${step.formula}${detail(step, answer)}</span><span class="figure">${exactNumber(step.value)}</span></li>`)}</ol>
    ${answer.exact === false ? html`<p class="problem" id="inexact">These steps do not end in the weight: this model adds something to its scores that is unknown here.</p>` : nothing}
    ${share === null || share === undefined ? nothing : html`<div class="value" title="The value's part of what this query reads: |weight · v| over the sum for all keys">
      <span>value’s part</span><meter min="0" max="1" .value=${share} aria-label="Share of the head's output"></meter><span class="figure">${percent(share)}</span></div>
      <p class="quiet tight">|v| ${shortNumber(answer.value_norm, 3)} · |w·v| ${shortNumber(answer.part_norm, 3)}${answer.out_norm === null || answer.out_norm === undefined ? "" : ` · after W_o ${shortNumber(answer.out_norm, 3)}`}</p>`}
    </div>`, element);
  drawBars(q, k);
}

// The number that a step brings in.
function detail(step, answer) {
  const [name, value] = { scaled: ["β", answer.scale], biased: ["bias", answer.bias], exponential: ["max", answer.max], weight: ["sum", answer.sum] }[step.name] ?? [];
  return typeof value === "number" ? `, ${name} ${exactNumber(Number(value.toPrecision(5)))}` : "";
}

// q, k and their product for each dimension: three rows of bars, up for positive and down for negative numbers.
function drawBars(q, k) {
  const colours = palette(isDark(state.theme));
  const box = bars.parentElement.getBoundingClientRect();
  const [width, height] = [box.width, box.height];
  const context = cleared(bars, width, height);
  if (!context) return;
  const products = q.map((value, index) => value * k[index]);
  bars.setAttribute("aria-label", `q, k and their products in ${q.length} dimensions; the products add up to ${exactNumber(products.reduce((a, b) => a + b, 0))}`);
  const rows = [["q", q, colours.line], ["k", k, colours.line], ["q·k", products, colours.accent]];
  const gutter = 26, high = height / 3;
  rows.forEach(([title, values, colour], row) => {
    const most = Math.max(1e-12, ...values.map(Math.abs));
    const middle = row * high + high / 2;
    context.font = `11px ${FONT}`;
    context.fillStyle = colours.quiet;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillText(title, 0, middle);
    context.fillStyle = colours.rule;
    context.fillRect(gutter, middle - 0.5, width - gutter, 1);
    const wide = (width - gutter) / values.length;
    context.fillStyle = colour;
    values.forEach((value, index) => {
      const size = (value / most) * (high / 2 - 2);
      context.fillRect(gutter + index * wide, middle - Math.max(0, size), Math.max(0.7, wide - (wide > 3 ? 1 : 0)), Math.abs(size));
    });
  });
}
