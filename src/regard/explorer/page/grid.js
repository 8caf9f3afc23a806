// The left: every head of every layer as a thumbnail with its label and entropy, or coloured by its effect.

import { html, render, nothing } from "./vendor/lit-html.js";
import { state, redraw } from "./store.js";
import { chooseHead, setOption, findEffects, cancel } from "./actions.js";
import { describeHead } from "./runs.js";
import { Surface, FONT } from "./surface.js";
import { paintTable } from "./paint.js";
import { palette, isDark, LABELS } from "./colours.js";
import { shortNumber, exactNumber } from "./numbers.js";
import { showTip, hideTip } from "./tip.js";

const HEADER = 16, MARK = 10;
let surface = null;
let cells = [];
let cursor = null; // the cell that arrow keys have reached

function effectOf(effects, layer, head) {
  const effect = effects?.get(`${layer.index}:${head}`);
  return effect ? effect.divergence ?? effect.distance : null;
}

function layerName(layer) {
  return `${{ encoder: "enc ", decoder: "dec ", cross: "cross " }[layer.stack] ?? ""}${layer.number}`;
}

function allHeads() {
  return state.run.layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => ({ layer, head })));
}

// Heads in the order of the chosen sort, in sections with a title.
function sections() {
  const heads = allHeads();
  const number = (value, missing) => value ?? missing;
  if (state.sort === "entropy") {
    heads.sort((a, b) => number(a.layer.entropy?.[a.head], 99) - number(b.layer.entropy?.[b.head], 99));
    return [{ title: "from one key to all alike", heads }];
  }
  if (state.sort === "effect" && state.run.effects) {
    heads.sort((a, b) => number(effectOf(state.run.effects, b.layer, b.head), -1) - number(effectOf(state.run.effects, a.layer, a.head), -1));
    return [{ title: "from the largest effect", heads }];
  }
  const named = (name) => heads.filter(({ layer, head }) => (layer.labels?.[head] ?? null) === name)
    .sort((a, b) => b.layer.strength?.[b.head] - a.layer.strength?.[a.head]);
  return [...Object.keys(LABELS), null].map((name) => ({ name, title: name ?? "no label", heads: named(name) })).filter((section) => section.heads.length);
}

// Thumbnail, and whether its label stands below it, beside it or on it.
function shapeOf(wide, high) {
  let side = Math.min(wide - 3, high - 3);
  if (high - side >= MARK + 3) return { side, where: "below" };
  if (wide - side >= MARK - 3) return { side, where: "beside" };
  const smaller = Math.min(wide - 3, high - 3 - MARK);
  if (smaller >= 13) return { side: smaller, where: "below" };
  return { side, where: "on" };
}

// Layers down, heads across. Where there is more height than width, the heads of a layer take several lines.
function layoutByLayer(width, height, twin, byEffect) {
  const { layers } = state.run;
  const most = Math.max(...layers.map((layer) => layer.heads));
  const groups = layers[0].kv_heads && layers[0].kv_heads < layers[0].heads ? layers[0].kv_heads : 1;
  const gap = groups > 1 ? 5 : 0;
  const gutter = state.base.info.sources ? 46 : 22;
  const top = HEADER + (twin ? 14 : 0);
  // The random twin stands below the model where both have room, else beside it.
  const parts = twin ? 2 : 1, stacked = twin && (height / 2 - top) / layers.length >= 15;
  const between = twin && !stacked ? 14 : 0;
  if (stacked) height /= 2;
  const room = (width - gutter - between) / (stacked ? 1 : parts);
  let shape = null;
  for (const lines of groups > 1 || byEffect ? [1] : [1, 2, 3]) {
    const across = Math.ceil(most / lines), space = lines > 1 ? 6 : 0;
    const wide = Math.min(64, (room - gap * (groups - 1)) / across);
    const high = Math.min((height - top - space * layers.length) / layers.length / lines, byEffect ? 2.4 * wide : wide + MARK + 4);
    const better = shapeOf(wide, high);
    if (!shape || better.side > shape.side + 4) shape = { ...better, lines, across, space, wide, high };
  }
  const { lines, across, space, wide, high } = shape;
  const placed = [];
  for (let part = 0; part < parts; part++) {
    const left = gutter + (stacked ? 0 : part * (wide * across + gap * (groups - 1) + between));
    const above = top + (stacked ? part * height : 0);
    for (const layer of layers) {
      const share = layer.heads / (layer.kv_heads && layer.kv_heads < layer.heads ? layer.kv_heads : layer.heads);
      for (let head = 0; head < layer.heads; head++) {
        const extra = groups > 1 && share > 1 ? Math.floor(head / share) * gap : 0;
        const y = above + layer.position * (high * lines + space) + Math.floor(head / across) * high;
        placed.push({ layer, head, part, numbered: lines > 1, x: left + (head % across) * wide + extra, y, wide, high });
      }
    }
  }
  return { placed, shape, wide, high, below: stacked ? height : 0, step: high * lines + space, lines, most, groups, gap, top, gutter, headings: [] };
}

function layoutSorted(width, height) {
  const parts = sections();
  const heading = 18;
  for (let wide = 50; ; wide -= 0.5) {
    const across = Math.floor(width / wide), high = wide + MARK + 2;
    const rows = parts.reduce((sum, part) => sum + Math.ceil(part.heads.length / across), 0);
    if (rows * high + parts.length * heading > height && wide > 13) continue;
    const placed = [], headings = [];
    let y = 0;
    for (const part of parts) {
      headings.push({ text: part.name === undefined ? part.title : `${part.title} · ${part.heads.length}`, label: part.name, y: y + heading / 2 });
      y += heading;
      part.heads.forEach((place, index) => placed.push({ ...place, part: 0, x: (index % across) * wide, y: y + Math.floor(index / across) * high, wide, high }));
      y += Math.ceil(part.heads.length / across) * high;
    }
    return { placed, shape: shapeOf(wide, high), wide, high, headings };
  }
}

export function drawModel() {
  const element = document.getElementById("model");
  surface ??= newSurface();
  render(html`
    <div class="heading"><h2>Heads</h2><span class="group" role="group" aria-label="Sort heads">${["layer", "label", "entropy", "effect"].map((name) => html`<button data-sort=${name} aria-pressed=${state.sort === name} ?disabled=${name === "effect" && !state.run?.effects} title=${name === "effect" && !state.run?.effects ? "Press Effects first" : `Sort by ${name}`} @click=${() => setOption("sort", name)}>${name}</button>`)}</span></div>
    <div class="thumbs">${surface.element}</div>
    ${state.live ? effectsBar() : nothing}
    <div class="labels">${labelsPresent()}</div>`, element);
  drawThumbs();
}

function effectsBar() {
  if (state.progress || (state.busy && /^Silencing/.test(state.busy))) {
    const { done = 0, total = 1 } = state.progress ?? {};
    return html`<div class="effects"><progress id="progress" .value=${done} max=${total} aria-label="Heads silenced"></progress><span class="quiet">${done} of ${total}</span><button id="cancel" @click=${cancel}>cancel</button></div>`;
  }
  const colour = (name, words) => html`<button data-colour=${name} aria-pressed=${state.colour === name} @click=${() => setOption("colour", name)}>${words}</button>`;
  return html`<div class="effects">
    ${state.run?.effects
      ? html`<span class="group" role="group" aria-label="Colour heads by">${colour("attention", "attention")}${colour("effect", "effect")}</span>
        ${state.run.twinEffects ? nothing : html`<button id="twin-effects" title="Silence each head of a randomly initialised twin, and show it beside" @click=${() => findEffects(true)}>beside a random twin</button>`}`
      : html`<button id="effects" ?disabled=${!state.opened || Boolean(state.busy)} title="Silence every head once and see how far the output moves" @click=${() => findEffects(false)}>Effects</button><span class="quiet">silence each head once, colour by what it changes</span>`}
  </div>`;
}

function labelsPresent() {
  if (!state.run) return nothing;
  if (state.colour === "effect" && state.run.effects) {
    const most = largestEffect();
    return html`<span class="legend"><span>0</span><i class="ramp effect"></i><span>${exactNumber(Number(most.toPrecision(3)))}</span><span>${usesDivergence() ? "KL in nats when silenced" : "relative change of the output"}</span></span>`;
  }
  const present = new Set(state.run.layers.flatMap((layer) => layer.labels ?? []));
  return Object.entries(LABELS).filter(([name]) => present.has(name)).map(([name, { letter, words }]) => html`<span class="chip small" data-label=${name} title=${`attends to ${words}`}><b class="letter">${letter}</b>${name}</span>`);
}

function usesDivergence() {
  const [first] = state.run.effects.values();
  return first?.divergence !== null && first?.divergence !== undefined;
}

function largestEffect() {
  const values = [state.run.effects, state.run.twinEffects].filter(Boolean).flatMap((effects) => [...effects.values()].map((effect) => effect.divergence ?? effect.distance));
  return Math.max(1e-9, ...values);
}

function newSurface() {
  const made = new Surface("heads", () => redraw("model"));
  made.over.id = "heads";
  made.over.setAttribute("role", "application");
  made.over.addEventListener("pointermove", pointed);
  made.over.addEventListener("pointerleave", () => {
    hideTip();
    made.hovered = null;
    drawChosen();
  });
  made.over.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) chooseHead(cell.layer.position, cell.head);
  });
  return made;
}

function cellAt(event) {
  const box = surface.over.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return cells.find((cell) => x >= cell.x && x < cell.x + cell.wide && y >= cell.y && y < cell.y + cell.high) ?? null;
}

function pointed(event) {
  const cell = cellAt(event);
  surface.over.style.cursor = cell ? "pointer" : "default";
  if (cell !== surface.hovered) {
    surface.hovered = cell;
    drawChosen();
  }
  if (!cell) return hideTip();
  const { layer, head } = cell;
  const label = layer.labels?.[head];
  const effect = state.run.effects?.get(`${layer.index}:${head}`), twin = state.run.twinEffects?.get(`${layer.index}:${head}`);
  showTip(html`<div><b>${describeHead(layer, head)}</b></div>
    <div>${!layer.labels ? "…" : label ? `${label} ${shortNumber(layer.strength[head])}: attends to ${LABELS[label]?.words ?? label}` : "no pattern stands out"}</div>
    <div class="quiet">entropy ${shortNumber(layer.entropy?.[head])} nats · first token ${shortNumber(layer.first?.[head])}${layer.distance?.[head] === null || layer.distance?.[head] === undefined ? "" : ` · distance ${shortNumber(layer.distance[head], 1)}`}</div>
    ${layer.windows ? html`<div class="quiet">drawn: window ${layer.window + 1} of ${layer.windows[0] * layer.windows[1]}; label and numbers: of all windows</div>` : nothing}
    ${effect ? html`<div>silenced: ${effect.divergence === null || effect.divergence === undefined ? "" : `KL ${exactNumber(effect.divergence)}, `}output moves ${exactNumber(effect.distance)}${twin ? `; twin: ${exactNumber(twin.divergence ?? twin.distance)}` : ""}</div>` : nothing}`, event.clientX, event.clientY);
}

function drawThumbs() {
  const context = state.run && surface.data();
  if (!context) return;
  const colours = palette(isDark(state.theme));
  const byEffect = state.colour === "effect" && state.run.effects;
  const twin = byEffect && state.run.twinEffects && state.sort === "layer";
  const layout = state.sort === "layer" || (state.sort === "effect" && !state.run.effects)
    ? layoutByLayer(surface.width, surface.height, twin, byEffect) : layoutSorted(surface.width, surface.height);
  cells = layout.placed;
  const most = byEffect ? largestEffect() : 1;
  for (const cell of cells) {
    if (byEffect) drawEffect(context, cell, layout.shape, colours, most);
    else if (cell.layer.loaded) drawThumb(context, cell, layout.shape, colours);
    else drawWaiting(context, cell, layout.shape, colours);
  }
  if (layout.top) rulers(context, layout, colours, twin, byEffect);
  for (const { text, y } of layout.headings) {
    context.font = `11px ${FONT}`;
    context.fillStyle = colours.quiet;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, 1, y);
  }
  surface.describe(`${cells.length} heads. Arrows move, Enter chooses. Chosen: ${describeHead(state.run.layers[state.layer], state.head)}`);
  drawChosen();
}

function drawThumb(context, cell, { side, where }, colours) {
  const { layer, head, x, y } = cell;
  const [high, wide] = layer.size;
  const codes = layer.codes.subarray(head * high * wide, (head + 1) * high * wide);
  paintTable(context, { x, y, width: side, height: side }, codes, high, wide, colours);
  context.strokeStyle = colours.rule;
  context.lineWidth = 0.5;
  context.strokeRect(x, y, side, side);
  const known = LABELS[layer.labels?.[head]];
  const entropy = layer.entropy?.[head] ?? null;
  const share = entropy === null ? null : Math.min(1, Math.max(0, entropy / Math.log(Math.max(2, layer.columns))));
  const [left, top] = where === "below" ? [x, y + side + 1] : where === "beside" ? [x + side + 1, y] : [x + side - MARK, y + side - MARK];
  const size = Math.min(MARK, where === "beside" ? cell.wide - side - 1 : MARK);
  if (known) {
    context.fillStyle = known.colour;
    context.fillRect(left, top, size, MARK);
    context.fillStyle = known.ink;
    context.font = `700 9px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(known.letter, left + size / 2, top + MARK / 2 + 0.5);
  }
  if (share === null || where === "on") return;
  context.fillStyle = colours.rule;
  if (where === "below") {
    const room = Math.max(2, side - size - 2 - (cell.numbered ? 14 : 0));
    if (cell.numbered) numberBelow(context, cell, side, top, colours);
    context.fillStyle = colours.rule;
    context.fillRect(left + size + 2, top + 3.5, room, 3);
    context.fillStyle = colours.quiet;
    context.fillRect(left + size + 2, top + 3.5, room * share, 3);
  } else {
    const room = Math.max(2, side - MARK - 2);
    context.fillRect(left + size / 2 - 1.5, top + MARK + 2, 3, room);
    context.fillStyle = colours.quiet;
    context.fillRect(left + size / 2 - 1.5, top + MARK + 2 + room * (1 - share), 3, room * share);
  }
}

function numberBelow(context, { head, x }, side, top, colours) {
  context.font = `9px ${FONT}`;
  context.fillStyle = colours.quiet;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText(String(head), x + side, top + MARK / 2 + 0.5);
}

function drawWaiting(context, { x, y }, { side }, colours) {
  context.fillStyle = colours.rule;
  context.globalAlpha = 0.4;
  context.fillRect(x, y, side, side);
  context.globalAlpha = 1;
}

function drawEffect(context, cell, shape, colours, most) {
  const effect = effectOf(cell.part ? state.run.twinEffects : state.run.effects, cell.layer, cell.head);
  const [wide, high] = [cell.wide - 2, cell.high - 2];
  const part = effect === null ? 0 : Math.sqrt(Math.max(0, effect) / most);
  context.fillStyle = effect === null ? colours.ground : colours.effect(part);
  context.fillRect(cell.x, cell.y, wide, high);
  context.strokeStyle = colours.rule;
  context.lineWidth = 0.5;
  context.strokeRect(cell.x, cell.y, wide, high);
  const known = LABELS[cell.layer.labels?.[cell.head]];
  if (!known || wide < 9 || cell.part) return;
  context.fillStyle = part > 0.6 ? colours.ground : colours.ink;
  context.font = `600 9px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(known.letter, cell.x + wide / 2, cell.y + high / 2 + 0.5);
}

// Names of layers and heads, and brackets over heads that share keys and values.
function rulers(context, layout, colours, twin, byEffect) {
  const { layers } = state.run;
  context.font = `10px ${FONT}`;
  context.fillStyle = colours.quiet;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(11 / layout.step));
  for (const down of layout.below ? [0, layout.below] : [0]) {
    for (const layer of layers) {
      if (layer.position % every) continue;
      const y = down + layout.top + layer.position * layout.step + (byEffect ? layout.high : layout.shape.side) / 2;
      context.fillText(layerName(layer), layout.gutter - 6, y);
    }
  }
  context.textAlign = "center";
  const first = cells.filter((cell) => cell.layer.heads === layout.most && cell.layer === layers.find((layer) => layer.heads === layout.most));
  if (twin) partNames(context, layout, colours, first);
  if (layout.groups > 1) return brackets(context, layout, colours, first);
  const skip = Math.max(1, Math.ceil(13 / layout.wide));
  const above = (cell) => (cell.part ? layout.below : 0) + layout.top - 8;
  for (const cell of layout.lines > 1 ? [] : first) if (cell.head % skip === 0) context.fillText(String(cell.head), cell.x + layout.wide / 2 - 1, above(cell));
}

function partNames(context, layout, colours, first) {
  context.fillStyle = colours.ink;
  context.textAlign = "left";
  for (const cell of first) if (cell.head === 0) context.fillText(cell.part ? "random twin" : "this model", cell.x, cell.y - layout.top + 6);
  context.fillStyle = colours.quiet;
  context.textAlign = "center";
}

function brackets(context, layout, colours, first) {
  const share = layout.most / layout.groups;
  context.strokeStyle = colours.quiet;
  context.lineWidth = 1;
  for (let group = 0; group < first.length / share; group++) {
    const { x: left, y: top } = first[group * share], right = first[(group + 1) * share - 1].x + layout.wide - 3;
    context.beginPath();
    context.moveTo(left, top - 2);
    context.lineTo(left, top - 5);
    context.lineTo(right, top - 5);
    context.lineTo(right, top - 2);
    context.stroke();
    context.fillText(right - left > 40 ? `keys ${group % layout.groups}` : String(group % layout.groups), (left + right) / 2, top - 11);
  }
}

function drawChosen() {
  const context = surface.overlay();
  if (!context) return;
  const colours = palette(isDark(state.theme));
  const outline = (cell, colour, width) => {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(cell.x - 1.5, cell.y - 1.5, cell.wide, cell.high);
  };
  if (surface.hovered && cells.includes(surface.hovered)) outline(surface.hovered, colours.quiet, 1);
  for (const cell of cells) {
    const own = cell.layer.position === state.layer && (cell.head === state.head || state.head === "mean" || state.head === "max");
    if (own || state.head === "rollout") outline(cell, colours.accent, own && typeof state.head === "number" ? 2.5 : 1);
  }
  if (cursor && document.activeElement === surface.over) {
    const cell = cells.find((each) => each.layer.position === cursor.layer && each.head === cursor.head);
    if (cell) {
      context.setLineDash([3, 2]);
      outline(cell, colours.ink, 1.5);
      context.setLineDash([]);
    }
  }
}

// Arrow keys within the grid: to the nearest cell in that direction.
export function moveAmongHeads(down, across) {
  const from = cells.find((cell) => cell.layer.position === (cursor?.layer ?? state.layer) && cell.head === (cursor?.head ?? state.head)) ?? cells[0];
  if (!from) return;
  let best = null, least = Infinity;
  for (const cell of cells) {
    const [dx, dy] = [cell.x - from.x, cell.y - from.y];
    const ahead = across ? dx * across : dy * down;
    const aside = Math.abs(across ? dy : dx);
    if (cell.part !== from.part || ahead <= 1 || aside > cell.wide * 0.75) continue;
    if (ahead + 3 * aside < least) [best, least] = [cell, ahead + 3 * aside];
  }
  if (!best) return;
  cursor = { layer: best.layer.position, head: best.head };
  document.getElementById("spoken").textContent = `${describeHead(best.layer, best.head)}, ${best.layer.labels?.[best.head] ?? "no label"}`;
  chooseHead(cursor.layer, cursor.head);
}

// For tests and scripts: the middle of a head's thumbnail on the screen.
export function headOnScreen(layer, head) {
  const cell = cells.find((each) => each.layer.position === layer && each.head === head);
  if (!cell) return null;
  const box = surface.over.getBoundingClientRect();
  return { x: box.left + cell.x + cell.wide / 2, y: box.top + cell.y + cell.high / 3 };
}
