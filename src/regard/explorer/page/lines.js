// Tokens on both sides with lines between them: queries on the left, keys on the right, as thick as the weight.

import { fitted, widestName, FONT } from "./surface.js";
import { strongest, sumOfRows, sumOfColumns } from "./tables.js";
import { shortNumber } from "./numbers.js";

const TALLEST = 34, LEGIBLE = 11, MOST_LINES = 3000, DENSE = 200, FAINTEST = 0.005, EDGE = 8;

export function layoutLines(context, width, height, view) {
  context.font = `12px ${FONT}`;
  const room = Math.min(150, width * (width < 300 ? 0.22 : 0.3));
  const left = Math.min(room, widestName(context, view.rowGroups)) + EDGE + 6;
  const right = Math.min(room, widestName(context, view.columnGroups)) + EDGE + 40;
  const step = (count) => Math.min(TALLEST, (height - 2 * EDGE) / Math.max(1, count));
  const [rowStep, columnStep] = [step(view.rows), step(view.columns)];
  const middle = (count, size) => Math.max(EDGE, (height - count * size) / 2);
  return {
    width, height, left, right: width - right, rowStep, columnStep,
    rowTop: middle(view.rows, rowStep), columnTop: middle(view.columns, columnStep),
  };
}

const rowY = (layout, row) => layout.rowTop + (row + 0.5) * layout.rowStep;
const columnY = (layout, column) => layout.columnTop + (column + 0.5) * layout.columnStep;

export function locateLines(layout, view, x, y) {
  if (x < (layout.left + layout.right) / 2) {
    const row = Math.floor((y - layout.rowTop) / layout.rowStep);
    return row >= 0 && row < view.rows ? { row, column: -1 } : null;
  }
  const column = Math.floor((y - layout.columnTop) / layout.columnStep);
  return column >= 0 && column < view.columns ? { row: -1, column } : null;
}

function trace(context, layout, row, column) {
  const [from, to] = [layout.left + 4, layout.right - 4];
  const [begin, end] = [rowY(layout, row), columnY(layout, column)];
  const bend = (to - from) * 0.4;
  context.moveTo(from, begin);
  context.bezierCurveTo(from + bend, begin, to - bend, end, to, end);
}

function names(context, layout, view, colours, side) {
  const [groups, size, y] = side === "row" ? [view.rowGroups, layout.rowStep, rowY] : [view.columnGroups, layout.columnStep, columnY];
  const every = Math.max(1, Math.ceil(LEGIBLE / size));
  context.textBaseline = "middle";
  context.font = `${size < 14 ? 10.5 : 12}px ${FONT}`;
  groups.forEach((group, index) => {
    if (index % every) return;
    name(context, layout, group, y(layout, index), side, every > 1 || group.special ? colours.quiet : colours.ink);
  });
}

function name(context, layout, group, y, side, colour) {
  const [x, room] = side === "row" ? [layout.left - 2, layout.left - EDGE] : [layout.right + 2, layout.width - layout.right - 38];
  context.textAlign = side === "row" ? "right" : "left";
  context.fillStyle = colour;
  context.fillText(fitted(context, group.text, room), x, y);
}

// The lines of all queries, the strongest of them.
export function drawLines(context, layout, view, colours, alignment) {
  const best = alignment ? Array.from({ length: view.rows }, (_, row) => bestColumn(view, row)) : null;
  const lines = strongestLines(view, best);
  if (lines.length > DENSE) paintDense(context, layout, view, colours, lines);
  else strokeLines(context, layout, view, colours, lines);
  if (best) drawAlignment(context, layout, view, colours, best);
  names(context, layout, view, colours, "row");
  names(context, layout, view, colours, "column");
}

// Cells whose lines are drawn; a count by weight finds the limit without sorting all of them.
function strongestLines(view, best) {
  const { weights } = view.shown;
  const counts = new Uint32Array(1025);
  for (let i = 0; i < weights.length; i++) counts[Math.min(1024, Math.abs(weights[i]) * 1024) | 0]++;
  let level = 1024, total = 0;
  while (level > 0 && total + counts[level] <= MOST_LINES) total += counts[level--];
  const faintest = Math.max(FAINTEST, (level + 1) / 1024);
  const lines = [];
  for (let i = 0; i < weights.length; i++) {
    if (Math.abs(weights[i]) < faintest) continue;
    if (best?.[Math.floor(i / view.columns)] !== i % view.columns) lines.push(i);
  }
  return lines;
}

function strokeLines(context, layout, view, colours, lines) {
  const batches = [0.04, 0.1, 0.2, 0.4, 0.7, Infinity];
  const paths = batches.map(() => new Path2D());
  for (const i of lines) {
    const weight = Math.abs(view.shown.weights[i]);
    trace(paths[batches.findIndex((top) => weight < top)], layout, Math.floor(i / view.columns), i % view.columns);
  }
  context.strokeStyle = colours.line;
  paths.forEach((path, index) => {
    context.globalAlpha = [0.12, 0.2, 0.32, 0.5, 0.7, 0.9][index];
    context.lineWidth = [0.6, 0.8, 1.1, 1.6, 2.2, 3][index];
    context.stroke(path);
  });
  context.globalAlpha = 1;
}

let ink = null;
const inkSheet = document.createElement("canvas");

// Thousands of lines as density: added up pixel by pixel, which takes a tenth of the time of stroking them.
function paintDense(context, layout, view, colours, lines) {
  const left = Math.round(layout.left + 4), width = Math.round(layout.right - 4) - left, height = Math.round(layout.height);
  if (width < 2) return;
  if (ink?.length !== width * height) ink = new Float32Array(width * height);
  ink.fill(0);
  const bend = Float32Array.from({ length: width }, (_, x) => { const part = x / (width - 1); return part * part * (3 - 2 * part); });
  for (const i of lines) {
    const begin = rowY(layout, Math.floor(i / view.columns)), rise = columnY(layout, i % view.columns) - begin;
    const strength = 0.04 + Math.abs(view.shown.weights[i]);
    let last = begin;
    for (let x = 0; x < width; x++) {
      const y = begin + rise * bend[x];
      const from = Math.floor(Math.min(last, y)), to = Math.floor(Math.max(last, y));
      const share = strength / (to - from + 1) ** 0.5;
      for (let row = Math.max(0, from); row <= to && row < height; row++) ink[row * width + x] += share;
      last = y;
    }
  }
  const image = new ImageData(width, height);
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colours.line.slice(at, at + 2), 16));
  const pixels = new Uint32Array(image.data.buffer);
  const colour = (blue << 16) | (green << 8) | red;
  for (let i = 0; i < ink.length; i++) if (ink[i]) pixels[i] = ((255 * (1 - Math.exp(-ink[i]))) << 24) | colour;
  inkSheet.width = width;
  inkSheet.height = height;
  inkSheet.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(inkSheet, left, 0);
}

// Each query's strongest key, in the accent colour.
function drawAlignment(context, layout, view, colours, best) {
  context.strokeStyle = colours.accent;
  best.forEach((column, row) => {
    context.lineWidth = 1 + 2 * Math.min(1, Math.abs(view.table.weights[row * view.columns + column]));
    context.beginPath();
    trace(context, layout, row, column);
    context.stroke();
  });
}

export function bestColumn(view, row) {
  const begin = row * view.columns;
  let best = 0;
  for (let column = 1; column < view.columns; column++) {
    if (view.table.weights[begin + column] > view.table.weights[begin + best]) best = column;
  }
  return best;
}

// The lines and names of the tokens in focus, above the pale lines of all others.
export function drawLinesFocus(context, layout, view, colours, focus) {
  names(context, layout, view, colours, "row");
  names(context, layout, view, colours, "column");
  const byRow = focus.rows.length > 0;
  const sums = byRow ? sumOfRows(view.shown, focus.rows) : sumOfColumns(view.shown, focus.columns);
  const most = byRow ? focus.rows.length : focus.columns.length;
  context.strokeStyle = colours.line;
  context.lineCap = "round";
  const drawnLines = strongest(sums, 60).filter((index) => sums[index] !== 0);
  for (const index of drawnLines.reverse()) {
    for (const chosen of byRow ? focus.rows : focus.columns) {
      const [row, column] = byRow ? [chosen, index] : [index, chosen];
      const weight = Math.min(1, Math.abs(view.shown.weights[row * view.columns + column]));
      if (weight < 0.001) continue;
      const pair = byRow && focus.columns.includes(column);
      context.strokeStyle = pair ? colours.accent : colours.line;
      context.globalAlpha = Math.min(1, 0.15 + Math.sqrt(weight));
      context.lineWidth = 0.8 + 4.5 * weight;
      context.beginPath();
      trace(context, layout, row, column);
      context.stroke();
    }
  }
  context.globalAlpha = 1;
  partners(context, layout, view, colours, byRow ? "column" : "row", sums, most);
  for (const row of focus.rows) plate(context, layout, view, colours, "row", row, colours.accent, colours.ground, "");
  for (const column of focus.columns) plate(context, layout, view, colours, "column", column, colours.accent, colours.ground, byRow ? shortNumber(sums[column], 2) : "");
}

// The strongest partners, on plates coloured by their weight, with their numbers; those that would touch are left out.
function partners(context, layout, view, colours, side, sums, most) {
  const [size, y] = side === "row" ? [layout.rowStep, rowY] : [layout.columnStep, columnY];
  const taken = [];
  for (const index of strongest(sums, size < LEGIBLE ? 14 : 80)) {
    const part = sums[index] / most;
    if (Math.abs(part) < 0.004) break;
    const at = y(layout, index);
    if (size < LEGIBLE && taken.some((other) => Math.abs(other - at) < 14)) continue;
    taken.push(at);
    const ink = Math.sqrt(Math.abs(part)) > 0.62 ? colours.ground : colours.ink;
    plate(context, layout, view, colours, side, index, colours.weight(Math.sign(part) * Math.sqrt(Math.abs(part))), ink, taken.length <= 12 || size >= LEGIBLE ? shortNumber(sums[index], 2) : "");
  }
}

function plate(context, layout, view, colours, side, index, fill, ink, number) {
  const [groups, size, y] = side === "row" ? [view.rowGroups, layout.rowStep, rowY] : [view.columnGroups, layout.columnStep, columnY];
  const high = Math.max(13, Math.min(18, size));
  const at = y(layout, index);
  context.font = `${size < 14 ? 10.5 : 12}px ${FONT}`;
  context.textBaseline = "middle";
  const [x, wide] = side === "row" ? [2, layout.left] : [layout.right - 3, layout.width - layout.right - 36];
  context.fillStyle = colours.ground;
  context.fillRect(x, at - high / 2, wide + (side === "row" ? 0 : 38), high);
  context.fillStyle = fill;
  context.beginPath();
  context.roundRect(x, at - high / 2, wide, high, 3);
  context.fill();
  name(context, layout, groups[index], at, side, ink);
  if (!number) return;
  context.fillStyle = colours.quiet;
  context.font = `10.5px ${FONT}`;
  context.textAlign = "left";
  if (side === "column") context.fillText(number, layout.width - 36, at);
  else context.fillText(number, layout.left + 5, at);
}
