// The Cost card: FLOPs and bytes of this head over the length, beside other mechanisms; where they cross is marked.

import { html, render, nothing } from "./vendor/lit-html.js";
import { uPlot } from "./vendor/uplot.js";
import { state, redraw, awaited, mechanismTitle } from "./store.js";
import { cost, setOption } from "./actions.js";
import { palette, isDark } from "./colours.js";
import { withPrefix, count } from "./numbers.js";

const UNITS = { flops: "FLOP", bytes: "B" };
const BRIEF_UNITS = { flops: "", bytes: "B" }; // where the buttons above say the rest
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 2]];
const HUES = ["accent", "#0072B2", "#009E73", "#CC79A7", "#E69F00"];
const prices = new Map();
const plotBox = document.createElement("div");
plotBox.className = "plot";
plotBox.setAttribute("role", "img");
new ResizeObserver(() => redraw("cost")).observe(plotBox);
let plot = null;
let plotted = "";
let countingFor = "";

function askCost(place) {
  if (countingFor === place) return;
  countingFor = place;
  awaited(cost()).then((answer) => prices.set(place, answer)).catch((problem) => prices.set(place, { problem: problem.message })).finally(() => {
    countingFor = "";
    redraw("cost");
  });
}

// Layers of one shape with one mechanism cost the same.
function placeOfCost() {
  const layer = state.run.layers[state.layer];
  const head = typeof state.head === "number" ? layer.head_mechanisms?.[state.head] : null;
  const mechanism = head ?? layer.mechanism ?? {};
  return JSON.stringify([state.model, mechanism.name, mechanism.fields, layer.kind, layer.rows, layer.columns, layer.causal, layer.heads, layer.kv_heads]);
}

function at(lengths, values, length) {
  let above = lengths.findIndex((each) => each >= length);
  if (above < 0) above = lengths.length - 1;
  const below = Math.max(0, above - 1);
  if (above === below || !values[below]) return values[above];
  const part = Math.log(length / lengths[below]) / Math.log(lengths[above] / lengths[below]);
  return values[below] * (values[above] / values[below]) ** Math.min(1, Math.max(0, part));
}

export function drawCost() {
  const element = document.getElementById("cost");
  const say = (words) => render(html`<h2>Cost</h2><p class="empty">${words}</p>`, element);
  if (!state.live) return say(html`Costs over the length are computed by the live page: <code>regard view</code>`);
  if (!state.opened) return say("FLOPs and bytes of a head, over the length.");
  const place = placeOfCost();
  const answer = prices.get(place);
  if (!answer) {
    askCost(place);
    if (!plot) say("Counting…");
    return;
  }
  if (answer.problem) return say(answer.problem);
  costCard(element, answer, place);
}

function costCard(element, answer, place) {
  const { lengths, here } = answer;
  const [first, last] = [Math.log2(lengths[0]), Math.log2(lengths[lengths.length - 1])];
  const length = state.length ?? Math.max(lengths[0], here.length);
  const unit = BRIEF_UNITS[state.costUnit];
  const own = answer.mechanism ?? state.run.layers[state.layer].mechanism?.name ?? "this";
  const curves = [{ mechanism: own, flops: answer.flops, bytes: answer.bytes }, ...answer.peers].slice(0, 5);
  const choose = (name, words) => html`<button data-unit=${name} aria-pressed=${state.costUnit === name} @click=${() => setOption("costUnit", name)}>${words}</button>`;
  const crossing = answer.crossovers.filter((each) => each.length > lengths[0]).sort((a, b) => a.length - b.length);
  render(html`
    <h2>Cost <span class="quiet plain">of one head</span><span class="group push" role="group" aria-label="Unit">${choose("flops", "FLOPs")}${choose("bytes", "bytes")}</span></h2>
    ${plotBox}
    <div class="row"><input id="length" type="range" min=${first} max=${last} step="0.05" .value=${String(Math.log2(length))} aria-label="Length of the text in tokens" aria-valuetext=${`${count(length)} tokens`}
      @input=${(event) => { state.length = Math.round(2 ** Number(event.target.value)); redraw("cost"); }}><output id="lengthvalue">${count(length)} tokens</output></div>
    <ul class="prices">${curves.map((curve, index) => html`<li data-mechanism=${curve.mechanism}><svg width="18" height="6" aria-hidden="true"><line x1="0" x2="18" y1="3" y2="3" class=${`curve${index}`} stroke-dasharray=${DASHES[index].join(" ")}></line></svg><span class="name" title=${mechanismTitle(curve.mechanism)}>${index ? shortTitle(curve.mechanism) : html`<b>${shortTitle(curve.mechanism)}</b>`}</span><span class="figure">${withPrefix(at(lengths, curve[state.costUnit], length), unit)}</span></li>`)}</ul>
    <p class="quiet tight" id="crossover" title="From these lengths on the other mechanism is cheaper">${crossing.length ? html`○ cheaper from: ${crossing.map((each, index) => `${index ? ", " : ""}${shortTitle(each.mechanism)}: ${count(each.length)}`)}` : answer.peers.length ? "No crossing within these lengths." : nothing}</p>`, element);
  drawPlot(answer, curves, crossing, length, place);
}

function shortTitle(name) {
  return mechanismTitle(name).replace(/ kernel$|^Linear attention, |^Softmax within a /g, "");
}

function drawPlot(answer, curves, crossing, length, place) {
  const colours = palette(isDark(state.theme));
  const width = plotBox.clientWidth, height = plotBox.clientHeight;
  if (width < 40 || height < 30) return;
  const signature = [place, state.costUnit, colours.ground, width, height].join();
  if (signature !== plotted) {
    plot?.destroy();
    plotted = signature;
    plot = newPlot(answer, curves, colours, width, height);
    plotBox.setAttribute("aria-label", `${UNITS[state.costUnit]} over the length for ${curves.map((curve) => mechanismTitle(curve.mechanism)).join(", ")}`);
  }
  plot.marks = { length, crossing: crossing.map((each) => each.length), colours };
  plot.redraw(false);
}

function newPlot(answer, curves, colours, width, height) {
  const axis = { stroke: colours.quiet, font: "10px system-ui", ticks: { stroke: colours.rule, width: 1, size: 3 }, grid: { stroke: colours.rule, width: 0.5 } };
  const power = (value) => withPrefix(value, "").replace(/\.0+(?= |$)/, "").trim();
  const line = (hue) => (hue === "accent" ? colours.accent : hue);
  return new uPlot({
    width, height, padding: [6, 8, 0, 0], legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false, distr: 3, log: 2 }, y: { distr: 3, log: 10 } },
    axes: [
      { ...axis, size: 20, gap: 2, splits: () => [64, 1024, 16384, 262144], filter: (self, marks) => marks, values: () => ["64", "1k", "16k", "262k"] },
      { ...axis, size: 34, gap: 2, splits: (self, index, low, high) => decades(low, high, height), filter: (self, marks) => marks, values: (_, marks) => marks.map(power) },
    ],
    series: [{}, ...curves.map((_, index) => ({ stroke: line(HUES[index]), width: index ? 1.4 : 2.2, dash: DASHES[index], points: { show: false } }))],
    hooks: { draw: [drawMarks] },
  }, [answer.lengths, ...curves.map((curve) => curve[state.costUnit].map((value) => value || null))], plotBox);
}

// Powers of ten between the two, as many as have room.
function decades(low, high, height) {
  const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
  const most = Math.max(1, Math.min(3, Math.floor((height - 26) / 18)));
  const step = Math.max(1, Math.ceil((last - first) / most));
  const marks = [];
  for (let power = first; power <= last; power += step) marks.push(10 ** power);
  return marks;
}

// The chosen length as a line, crossings as rings on the line of this head's mechanism.
function drawMarks(self) {
  const { length, crossing, colours } = self.marks ?? {};
  if (!length) return;
  const { ctx: context } = self;
  const { left, top, width, height } = self.bbox;
  const ratio = devicePixelRatio || 1;
  context.save();
  const x = self.valToPos(length, "x", true);
  context.strokeStyle = colours.ink;
  context.lineWidth = ratio;
  context.setLineDash([3 * ratio, 3 * ratio]);
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, top + height);
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 2 * ratio;
  for (const place of crossing) {
    const y = self.valToPos(at(self.data[0], self.data[1], place), "y", true), across = self.valToPos(place, "x", true);
    if (across < left || across > left + width) continue;
    context.beginPath();
    context.arc(across, y, 4 * ratio, 0, 7);
    context.stroke();
  }
  context.restore();
}
