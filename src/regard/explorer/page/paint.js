// Tables of levels as pixels. Where several cells fall on a pixel the largest is shown: a mean would fade a single cell.

import { MASKED, NEGATIVE } from "./codes.js";

const PERIOD = 6; // of the hatching, in device pixels

// Pixels (width × height) of `levels` (rows × columns); `gap` leaves a line of paper between cells.
export function painted(levels, rows, columns, width, height, colours, gap = false) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const { pixels: table, hatch, paper } = colours;
  const begin = new Int32Array(width + 1);
  for (let x = 0; x <= width; x++) begin[x] = Math.floor((x * columns) / width);
  for (let y = 0; y < height; y++) {
    const top = Math.floor((y * rows) / height);
    const bottom = Math.max(top + 1, Math.floor(((y + 1) * rows) / height));
    const rowEnds = gap && Math.floor(((y + 1) * rows) / height) !== top;
    for (let x = 0; x < width; x++) {
      const left = begin[x];
      const right = Math.max(left + 1, begin[x + 1]);
      let level = levels[top * columns + left];
      if (bottom - top > 1 || right - left > 1) level = pooled(levels, columns, top, bottom, left, right);
      if (level === MASKED) pixels[y * width + x] = hatch[(x + y) % PERIOD < 2 ? 1 : 0];
      else if (rowEnds || (gap && begin[x + 1] !== left)) pixels[y * width + x] = paper;
      else pixels[y * width + x] = table[level];
    }
  }
  return image;
}

function pooled(levels, columns, top, bottom, left, right) {
  let best = MASKED, size = -1;
  for (let row = top; row < bottom; row++) {
    for (let column = left; column < right; column++) {
      const level = levels[row * columns + column];
      if (level === MASKED) continue;
      const weight = level >= NEGATIVE ? level - NEGATIVE : level;
      if (weight > size) {
        size = weight;
        best = level;
      }
    }
  }
  return best;
}

let sheet = null;

// Draws levels into a box of a context whose unit is the CSS pixel.
export function paintTable(context, box, levels, rows, columns, colours, gap = false) {
  const ratio = context.getTransform().a;
  const [width, height] = [Math.max(1, Math.round(box.width * ratio)), Math.max(1, Math.round(box.height * ratio))];
  sheet ??= document.createElement("canvas");
  sheet.width = width;
  sheet.height = height;
  sheet.getContext("2d").putImageData(painted(levels, rows, columns, width, height, colours, gap), 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(sheet, box.x, box.y, width / ratio, height / ratio);
}
