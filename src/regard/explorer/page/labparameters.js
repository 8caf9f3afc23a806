// The parameters of an experiment: a slider and a box for each number, with a log slider where its range asks for one.

import { html, nothing } from "./vendor/lit-html.js";

const STEPS = 1000;
const MOST_VALUES = 16;

// Places of the slider from 0 to 1. A range that begins at 0 or below has no logarithm: then it is that of the distance.
export function valueAt({ low, high, log, whole }, place) {
  const value = !log ? low + place * (high - low) : low > 0 ? low * (high / low) ** place : low + (high - low + 1) ** place - 1;
  return whole ? Math.round(value) : Number(Math.min(high, Math.max(low, value)).toPrecision(3));
}

export function placeOf({ low, high, log }, value) {
  if (!Number.isFinite(value) || high <= low) return 0;
  const place = !log ? (value - low) / (high - low) : low > 0 ? Math.log(value / low) / Math.log(high / low) : Math.log(value - low + 1) / Math.log(high - low + 1);
  return Math.min(1, Math.max(0, place || 0));
}

// `set` takes a parameter's name and its words, `reset` nothing.
export function drawParameters(experiment, values, set, reset) {
  return html`<h2>Parameters<button id="labdefaults" class="link push" @click=${reset}>defaults</button></h2>
    ${experiment.parameters.map((parameter) => parameterRows(parameter, values[parameter.name], (words) => set(parameter.name, words)))}`;
}

function parameterRows(parameter, words, set) {
  const { name, many, takes } = parameter;
  const title = name.replaceAll("_", " ");
  const seed = name === "seed";
  const change = (index, word) => set(words.map((old, place) => (place === index ? word : old)));
  const less = (index) => set(words.filter((_, place) => place !== index));
  return html`<div class="parameter" data-parameter=${name} role="group" aria-label=${title}>
    <span class="name" title=${takes}><b>${title}</b>${many ? `${words.length} values` : ""}${many && words.length < MOST_VALUES ? html`<button class="link more" aria-label=${`Another value of ${title}`} @click=${() => set([...words, next(parameter, words)])}>add</button>` : nothing}</span>
    ${words.map((word, index) => html`
      ${seed ? html`<button class="wide" @click=${() => change(index, String(Math.floor(Math.random() * 1e6)))}>another draw</button>` : slider(parameter, title, word, (value) => change(index, value), many ? ` ${index + 1}` : "")}
      <input type="text" inputmode="decimal" spellcheck="false" autocomplete="off" aria-label=${`${title}${many ? ` ${index + 1}` : ""}: ${takes}`} title=${takes} .value=${word} @change=${(event) => change(index, event.target.value.trim())}>
      ${many && words.length > 1 ? html`<button class="less" aria-label=${`Remove value ${index + 1} of ${title}`} title="Remove" @click=${() => less(index)}>×</button>` : html`<span></span>`}`)}</div>`;
}

function slider(parameter, title, word, change, place) {
  return html`<input type="range" min="0" max=${STEPS} step="1" .value=${String(Math.round(STEPS * placeOf(parameter, Number(word))))} aria-label=${`${title}${place}`} aria-valuetext=${word} @input=${(event) => change(String(valueAt(parameter, Number(event.target.value) / STEPS)))}>`;
}

// Another value of a list: beyond its last step, as far as the range goes.
function next(parameter, words) {
  const [before, last] = [Number(words.at(-2)), Number(words.at(-1))].map((value) => placeOf(parameter, value));
  const step = words.length > 1 && last > before ? last - before : 0.1;
  return String(valueAt(parameter, last + step <= 1 ? last + step : Math.max(0, placeOf(parameter, Number(words[0])) - step)));
}
