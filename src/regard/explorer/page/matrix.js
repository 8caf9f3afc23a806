// The matrix: queries down, keys across, a cell for each pair; hatched where the mask hides the key.

import { fitted, widestName, FONT } from "./surface.js";
import { paintTable } from "./paint.js";
import { bestColumn } from "./lines.js";

const LARGEST_CELL = 54, LABEL_ROOM = 11, MARGIN = 8;
const SLANT = -Math.PI / 3;

export function layoutMatrix(context, width, height, view) {
  context.font = `11.5px ${FONT}`;
  const left = Math.min(width * 0.24, 110, widestName(context, view.rowGroups)) + MARGIN + 4;
  const top = Math.min(height * 0.22, 84, widestName(context, view.columnGroups) * 0.87 + 10) + 16;
  const roomAcross = width - left - Math.min(38, MARGIN + width * 0.05), roomDown = height - top - MARGIN;
  const size = Math.min(LARGEST_CELL, roomAcross / view.columns, roomDown / view.rows);
  // Tables of very unequal sides would shrink to a strip: let their cells be oblong.
  const longest = Math.max(1, Math.min(3, Math.max(view.rows / view.columns, view.columns / view.rows) / 1.5));
  const wide = Math.min(LARGEST_CELL, roomAcross / view.columns, size * longest), high = Math.min(LARGEST_CELL, roomDown / view.rows, size * longest);
  // Small tables stand in the middle, with their labels.
  const box = { width: wide * view.columns, height: high * view.rows };
  box.x = left + (roomAcross - box.width) / 2;
  box.y = top + (roomDown - box.height) / 2;
  return { width, height, left, top, wide, high, box };
}

export function locateMatrix(layout, view, x, y) {
  const column = Math.floor((x - layout.box.x) / layout.wide), row = Math.floor((y - layout.box.y) / layout.high);
  const inside = [row >= 0 && row < view.rows, column >= 0 && column < view.columns];
  if (inside[0] && inside[1]) return { row, column };
  if (inside[0] && x < layout.box.x) return { row, column: -1 };
  if (inside[1] && y < layout.box.y) return { row: -1, column };
  return null;
}

export function cellBox(layout, row, column) {
  return { x: layout.box.x + column * layout.wide, y: layout.box.y + row * layout.high, width: layout.wide, height: layout.high };
}

export function drawMatrix(context, layout, view, colours, alignment) {
  const { box } = layout;
  paintTable(context, box, view.levels, view.rows, view.columns, colours, Math.min(layout.wide, layout.high) >= 9);
  context.strokeStyle = colours.rule;
  context.lineWidth = 1;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  labels(context, layout, view, colours);
  if (alignment && Math.min(layout.wide, layout.high) >= 5) marks(context, layout, view, colours);
}

function marks(context, layout, view, colours) {
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  for (let row = 0; row < view.rows; row++) {
    const cell = cellBox(layout, row, bestColumn(view, row));
    context.beginPath();
    context.arc(cell.x + cell.width / 2, cell.y + cell.height / 2, Math.min(cell.width, cell.height) * 0.28, 0, 7);
    context.stroke();
  }
}

function labels(context, layout, view, colours) {
  const everyRow = Math.max(1, Math.ceil(LABEL_ROOM / layout.high)), everyColumn = Math.max(1, Math.ceil(LABEL_ROOM / layout.wide));
  view.rowGroups.forEach((group, row) => {
    if (row % everyRow === 0) rowLabel(context, layout, group, row, everyRow > 1 || group.special ? colours.quiet : colours.ink);
  });
  view.columnGroups.forEach((group, column) => {
    if (column % everyColumn === 0) columnLabel(context, layout, group, column, everyColumn > 1 || group.special ? colours.quiet : colours.ink);
  });
  context.font = `10.5px ${FONT}`;
  context.fillStyle = colours.quiet;
  context.textAlign = "left";
  context.textBaseline = "top";
  context.fillText("query ↓  key →", Math.max(2, layout.box.x - layout.left), Math.max(2, layout.box.y - layout.top));
}

function rowLabel(context, layout, group, row, colour) {
  context.font = `${layout.high < 14 ? 10 : 11.5}px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = colour;
  context.fillText(fitted(context, group.text, layout.left - MARGIN - 4), layout.box.x - 5, layout.box.y + (row + 0.5) * layout.high);
}

function columnLabel(context, layout, group, column, colour) {
  context.font = `${layout.wide < 14 ? 10 : 11.5}px ${FONT}`;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = colour;
  context.save();
  context.translate(layout.box.x + (column + 0.5) * layout.wide, layout.box.y - 5);
  context.rotate(SLANT);
  context.fillText(fitted(context, group.text, (layout.top - 18) / 0.87), 0, 0);
  context.restore();
}

// Bands over the rows and columns in focus, and their names where not all have room.
export function drawMatrixFocus(context, layout, view, colours, focus) {
  const { box } = layout;
  context.strokeStyle = colours.accent;
  const tiny = Math.min(layout.wide, layout.high) < 5; // frames would cover what they point at
  context.lineWidth = tiny ? 0.7 : focus.locked ? 2 : 1.2;
  for (const row of focus.rows) {
    context.strokeRect(box.x - 1, box.y + row * layout.high - 0.5, box.width + 2, layout.high + 1);
    if (layout.high < LABEL_ROOM) wash(context, colours, box.x - layout.left, box.y + (row + 0.5) * layout.high - 8, layout.left - 2, 16);
    rowLabel(context, layout, view.rowGroups[row], row, colours.accent);
  }
  for (const column of focus.columns) {
    context.strokeRect(box.x + column * layout.wide - 0.5, box.y - 1, layout.wide + 1, box.height + 2);
    if (layout.wide < LABEL_ROOM) slantedWash(context, layout, colours, column);
    columnLabel(context, layout, view.columnGroups[column], column, colours.accent);
  }
  if (focus.rows.length !== 1 || focus.columns.length !== 1) return;
  const cell = cellBox(layout, focus.rows[0], focus.columns[0]);
  context.lineWidth = tiny ? 1.5 : 2.5;
  const margin = tiny ? 4 : 1;
  context.strokeRect(cell.x - margin, cell.y - margin, cell.width + 2 * margin, cell.height + 2 * margin);
}

function wash(context, colours, x, y, width, height) {
  context.fillStyle = colours.ground;
  context.globalAlpha = 0.92;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
}

function slantedWash(context, layout, colours, column) {
  context.save();
  context.translate(layout.box.x + (column + 0.5) * layout.wide, layout.box.y - 5);
  context.rotate(SLANT);
  wash(context, colours, -2, -8, (layout.top - 16) / 0.87, 16);
  context.restore();
}
