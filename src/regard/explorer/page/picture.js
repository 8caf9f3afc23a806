// A picture with its patches: what the chosen patch attends to, laid over the picture.

import { FONT, fitted } from "./surface.js";
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
  const [down, across] = view.run.info.grid ?? [1, view.columns];
  const first = view.run.info.class_token ? 1 : 0;
  const cell = Math.min((width - 32) / across, (height - 78) / down);
  const box = { x: (width - cell * across) / 2, y: Math.max(34, (height - cell * down) / 2 - 10), width: cell * across, height: cell * down };
  const classBox = first ? { x: box.x, y: box.y + box.height + 10, width: 92, height: 24 } : null;
  return { width, height, down, across, first, cell, box, classBox };
}

export function locatePicture(layout, view, x, y) {
  const { classBox, box } = layout;
  if (classBox && x >= classBox.x && x < classBox.x + classBox.width && y >= classBox.y && y < classBox.y + classBox.height) return { row: 0, column: -1 };
  const across = Math.floor((x - box.x) / layout.cell), down = Math.floor((y - box.y) / layout.cell);
  if (across < 0 || across >= layout.across || down < 0 || down >= layout.down) return null;
  const row = layout.first + down * layout.across + across;
  return row < view.rows ? { row, column: -1 } : null;
}

export function drawPicture(context, layout, view, colours, redrawn) {
  const image = imageOf(view.run, redrawn);
  const { box } = layout;
  context.imageSmoothingEnabled = false;
  if (image) context.drawImage(image, box.x, box.y, box.width, box.height);
  context.strokeStyle = colours.rule;
  context.lineWidth = 1;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
}

function patchBox(layout, index) {
  const place = index - layout.first;
  return [layout.box.x + (place % layout.across) * layout.cell, layout.box.y + Math.floor(place / layout.across) * layout.cell];
}

// The weights of the queries in focus; without one, what all patches attend to on average.
export function drawPictureFocus(context, layout, view, colours, focus) {
  const rows = focus?.rows.length ? focus.rows : [...view.rowGroups.keys()];
  const sums = sumOfRows(view.shown, rows);
  const most = largestOf(layout.first ? sums.subarray(1) : sums) || 1;
  for (let index = layout.first; index < view.columns; index++) {
    const [x, y] = patchBox(layout, index);
    context.fillStyle = TINT;
    context.globalAlpha = 0.85 * Math.sqrt(Math.abs(sums[index]) / most);
    context.fillRect(x, y, layout.cell, layout.cell);
  }
  context.globalAlpha = 1;
  context.strokeStyle = colours.accent;
  context.lineWidth = 2.5;
  for (const row of focus?.rows ?? []) {
    if (row < layout.first) continue;
    const [x, y] = patchBox(layout, row);
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
