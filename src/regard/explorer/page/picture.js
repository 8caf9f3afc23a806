// A picture with its patches: what the chosen patch attends to, laid over the picture.

import { FONT, fitted } from "./surface.js";
import { axisOf } from "./tokens.js";
import { sumOfRows, largestOf } from "./tables.js";

const TINT = "#3b9cf0"; // is seen on black, on white and on grey
const images = new Map();

// The image of a run once it is decoded; null until then.
function imageOf(run, arrived) {
  const address = run.info.picture;
  if (!address) return null;
  if (!images.has(address)) {
    const image = new Image();
    images.set(address, image);
    image.onload = arrived;
    image.src = address;
  }
  const image = images.get(address);
  return image.complete && image.naturalWidth ? image : null;
}

export function layoutPicture(context, width, height, view) {
  const [down, across] = view.place.grid ?? view.run.info.grid;
  const first = view.run.info.class_token ? 1 : 0;
  const cell = Math.min((width - 32) / across, (height - 78) / down);
  const box = { x: (width - cell * across) / 2, y: Math.max(34, (height - cell * down) / 2 - 10), width: cell * across, height: cell * down };
  const classBox = first && groupAt(view, 0) === 0 ? { x: box.x, y: box.y + box.height + 10, width: 92, height: 24 } : null;
  const { places } = axisOf(view.run, view.layer, "queries");
  const inWindow = view.place.windows ? new Map(places.map(([row, column], index) => [row * across + column, index])) : null;
  return { width, height, down, across, first, cell, box, classBox, places, inWindow };
}

export function locatePicture(layout, view, x, y) {
  const { classBox, box } = layout;
  if (classBox && x >= classBox.x && x < classBox.x + classBox.width && y >= classBox.y && y < classBox.y + classBox.height) return { row: 0, column: -1 };
  const across = Math.floor((x - box.x) / layout.cell), down = Math.floor((y - box.y) / layout.cell);
  if (across < 0 || across >= layout.across || down < 0 || down >= layout.down) return null;
  const place = down * layout.across + across;
  if (layout.inWindow) return layout.inWindow.has(place) ? { row: groupAt(view, layout.inWindow.get(place)), column: -1 } : { window: windowAt(view.place, down, across) };
  const row = groupAt(view, layout.first + place);
  return row >= 0 ? { row, column: -1 } : null;
}

function groupAt(view, token) {
  return view.rowGroups.findIndex((group) => group.tokens[0] === token);
}

function windowAt({ rows, windows }, down, across) {
  const side = Math.round(Math.sqrt(rows));
  return Math.floor(down / side) * windows[1] + Math.floor(across / side);
}

export function drawPicture(context, layout, view, colours, redrawn) {
  const image = imageOf(view.run, redrawn);
  const { box } = layout;
  context.imageSmoothingEnabled = false;
  if (image) context.drawImage(image, box.x, box.y, box.width, box.height);
  context.strokeStyle = colours.rule;
  context.lineWidth = 1;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  if (layout.inWindow) drawWindow(context, layout, view, colours);
}

// The frame of the window that is shown; what it has beyond the map is not drawn.
function drawWindow(context, { places, cell, box }, view, colours) {
  const [top, left] = places[0], side = Math.round(Math.sqrt(view.place.rows));
  context.save();
  context.beginPath();
  context.rect(box.x - 2, box.y - 2, box.width + 4, box.height + 4);
  context.clip();
  context.strokeStyle = colours.accent;
  context.setLineDash([5, 3]);
  context.strokeRect(box.x + left * cell - 0.5, box.y + top * cell - 0.5, side * cell + 1, side * cell + 1);
  context.restore();
}

// Where a patch is drawn; null for a place of a window beyond its map.
function patchBox(layout, index) {
  const [row, column] = layout.places?.[index] ?? [];
  if (row >= layout.down || column >= layout.across) return null;
  if (row !== undefined) return [layout.box.x + column * layout.cell, layout.box.y + row * layout.cell];
  const place = index - layout.first;
  return [layout.box.x + (place % layout.across) * layout.cell, layout.box.y + Math.floor(place / layout.across) * layout.cell];
}

// The weights of the queries in focus; without one, what all patches attend to on average.
export function drawPictureFocus(context, layout, view, colours, focus) {
  const rows = focus?.rows.length ? focus.rows : [...view.rowGroups.keys()];
  const sums = sumOfRows(view.shown, rows);
  const begin = layout.classBox ? 1 : 0;
  const most = largestOf(sums.subarray(begin)) || 1;
  for (let index = begin; index < view.columns; index++) {
    const corner = patchBox(layout, view.columnGroups[index].tokens[0]);
    if (!corner) continue;
    const [x, y] = corner;
    context.fillStyle = TINT;
    context.globalAlpha = 0.85 * Math.sqrt(Math.abs(sums[index]) / most);
    context.fillRect(x, y, layout.cell, layout.cell);
  }
  context.globalAlpha = 1;
  context.strokeStyle = colours.accent;
  context.lineWidth = 2.5;
  for (const row of focus?.rows ?? []) {
    const corner = layout.classBox && row === 0 ? null : patchBox(layout, view.rowGroups[row].tokens[0]);
    if (!corner) continue;
    const [x, y] = corner;
    context.strokeRect(x + 1, y + 1, layout.cell - 2, layout.cell - 2);
  }
  pictureCaption(context, layout, view, colours, focus, sums, rows.length);
}

function pictureCaption(context, layout, view, colours, focus, sums, count) {
  context.font = `12px ${FONT}`;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = colours.quiet;
  const who = focus?.rows.length ? focus.rows.map((row) => view.rowGroups[row].text).join(" + ") : "all queries, on average";
  context.fillText(fitted(context, `blue: attended to by ${who}`, layout.width - layout.box.x), layout.box.x, layout.box.y - 14);
  const { classBox } = layout;
  if (!classBox) return;
  const chosen = focus?.rows.includes(0);
  context.fillStyle = chosen ? colours.accent : colours.weight(Math.sqrt(Math.abs(sums[0]) / count));
  context.beginPath();
  context.roundRect(classBox.x, classBox.y, classBox.width, classBox.height, 4);
  context.fill();
  context.strokeStyle = colours.rule;
  context.lineWidth = 1;
  context.stroke();
  context.fillStyle = chosen || sums[0] / count > 0.4 ? colours.ground : colours.ink;
  context.textAlign = "center";
  context.fillText("class token", classBox.x + classBox.width / 2, classBox.y + classBox.height / 2);
}
