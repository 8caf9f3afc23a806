// What is shown, as a file: PNG, SVG, CSV, or the whole run as one HTML page.

import { state, redraw } from "./store.js";
import { exportedPage, say } from "./actions.js";
import { describeHead } from "./runs.js";
import { palette, isDark } from "./colours.js";
import { painted } from "./paint.js";
import { bestColumn } from "./lines.js";
import { FONT, cleared } from "./surface.js";

const MOST_RECTANGLES = 12000; // larger matrices stand in the SVG as a picture

function fileName(ending) {
  const words = `regard-${state.model}-layer-${state.layer}-head-${state.head}`;
  return `${words.replace(/[^\w.-]+/g, "_").slice(0, 120)}.${ending}`;
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function caption() {
  return `${state.run.info.model} · ${describeHead(state.run.layers[state.layer], state.head)}`;
}

// The surfaces as they stand on the screen, overlays and a title included.
export function savePicture(surfaces) {
  const colours = palette(isDark(state.theme));
  const boxes = surfaces.map((surface) => surface.element.getBoundingClientRect());
  const left = Math.min(...boxes.map((box) => box.left)), top = Math.min(...boxes.map((box) => box.top));
  const width = Math.max(...boxes.map((box) => box.right)) - left, height = Math.max(...boxes.map((box) => box.bottom)) - top + 30;
  const sheet = document.createElement("canvas");
  const context = cleared(sheet, width, height, Math.max(2, devicePixelRatio || 1));
  context.fillStyle = colours.ground;
  context.fillRect(0, 0, width, height);
  context.fillStyle = colours.ink;
  context.font = `600 13px ${FONT}`;
  context.fillText(caption(), 10, 20);
  surfaces.forEach((surface, index) => {
    const [x, y] = [boxes[index].left - left, boxes[index].top - top + 30];
    context.globalAlpha = Number(surface.base.style.opacity || 1);
    context.drawImage(surface.base, x, y, surface.width, surface.height);
    context.globalAlpha = 1;
    context.drawImage(surface.over, x, y, surface.width, surface.height);
  });
  sheet.toBlob((blob) => download(blob, fileName("png")));
}

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

function escaped(text) {
  // XML has no control characters, not even escaped ones.
  return String(text).replace(/[&<>"]/g, (sign) => ESCAPES[sign]).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
}

export function saveVector(shown) {
  download(new Blob([vectorOf(shown.filter((pane) => pane.view))], { type: "image/svg+xml" }), fileName("svg"));
}

// Lines and matrix of each pane, side by side, as text of an SVG file.
function vectorOf(shown) {
  const colours = palette(isDark(state.theme));
  const parts = [];
  let left = 10, tallest = 0;
  for (const { view, title } of shown) {
    const size = Math.max(4, Math.min(22, 560 / Math.max(view.rows, view.columns)));
    const label = size >= 8 ? Math.min(11, size * 0.8) : 0;
    const text = (x, y, words, more = "") => `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" ${more}>${escaped(words)}</text>`;
    const top = 110;
    parts.push(text(left, 44, title, `fill="${colours.quiet}"`));
    const lineLeft = left + 100, lineRight = lineLeft + 180;
    const lines = vectorLines(view, colours, lineLeft, lineRight, top, size);
    const names = (groups, x, anchor) => label ? groups.map((group, index) => text(x, top + (index + 0.5) * size + 3.5, group.text, `text-anchor="${anchor}" font-size="${label}"`)).join("") : "";
    parts.push(names(view.rowGroups, lineLeft - 5, "end"), lines, names(view.columnGroups, lineRight + 5, "start"));
    const matrixLeft = lineRight + 200;
    parts.push(names(view.rowGroups, matrixLeft - 5, "end"), vectorMatrix(view, colours, matrixLeft, top, size));
    if (label) parts.push(view.columnGroups.map((group, index) => text(0, 0, group.text, `font-size="${label}" transform="translate(${(matrixLeft + (index + 0.6) * size).toFixed(1)} ${top - 4}) rotate(-60)"`)).join(""));
    left = matrixLeft + view.columns * size + 40;
    tallest = Math.max(tallest, top + Math.max(view.rows, view.columns) * size + 20);
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${left.toFixed(0)}" height="${tallest.toFixed(0)}" font-family="system-ui, sans-serif" font-size="12" fill="${colours.ink}">
<rect width="100%" height="100%" fill="${colours.ground}"/>
<defs><pattern id="masked" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="4" height="4" fill="${colours.hatchColours[0]}"/><rect width="1.4" height="4" fill="${colours.hatchColours[1]}"/></pattern></defs>
<text x="10" y="22" font-weight="600">${escaped(caption())}</text>
${parts.join("\n")}
</svg>
`;
}

function vectorLines(view, colours, from, to, top, size) {
  const bend = (to - from) * 0.4;
  const all = [];
  view.shown.weights.forEach((weight, index) => { if (Math.abs(weight) > 0.02) all.push([Math.abs(weight), index]); });
  return all.sort((a, b) => b[0] - a[0]).slice(0, 1500).map(([weight, index]) => {
    const [row, column] = [Math.floor(index / view.columns), index % view.columns];
    const [begin, end] = [top + (row + 0.5) * size, top + (column + 0.5) * size];
    return `<path d="M${from} ${begin.toFixed(1)}C${from + bend} ${begin.toFixed(1)} ${to - bend} ${end.toFixed(1)} ${to} ${end.toFixed(1)}" fill="none" stroke="${colours.line}" stroke-opacity="${Math.min(1, 0.1 + weight).toFixed(2)}" stroke-width="${(0.5 + 3 * Math.min(1, weight)).toFixed(2)}"/>`;
  }).join("");
}

function vectorMatrix(view, colours, left, top, size) {
  const [wide, high] = [view.columns * size, view.rows * size];
  if (view.levels.length > MOST_RECTANGLES) {
    const sheet = document.createElement("canvas");
    [sheet.width, sheet.height] = [Math.round(wide), Math.round(high)];
    sheet.getContext("2d").putImageData(painted(view.levels, view.rows, view.columns, sheet.width, sheet.height, colours), 0, 0);
    return `<image x="${left}" y="${top}" width="${sheet.width}" height="${sheet.height}" href="${sheet.toDataURL()}"/>`;
  }
  const cells = [];
  for (let row = 0, index = 0; row < view.rows; row++) {
    const best = state.alignment && view.place.kind === "cross" ? bestColumn(view, row) : -1;
    for (let column = 0; column < view.columns; column++, index++) {
      const weight = view.shown.weights[index];
      const fill = view.shown.visible[index] ? colours.weight(Math.sign(weight) * Math.sqrt(Math.min(1, Math.abs(weight) / view.most))) : "url(#masked)";
      cells.push(`<rect x="${(left + column * size).toFixed(1)}" y="${(top + row * size).toFixed(1)}" width="${(size - 0.6).toFixed(1)}" height="${(size - 0.6).toFixed(1)}" fill="${fill}"/>`);
      if (column === best) cells.push(`<circle cx="${(left + (column + 0.5) * size).toFixed(1)}" cy="${(top + (row + 0.5) * size).toFixed(1)}" r="${(size * 0.28).toFixed(1)}" fill="none" stroke="${colours.accent}" stroke-width="1.4"/>`);
    }
  }
  return cells.join("");
}

// Rows are queries, columns are keys; an empty cell is masked.
function tableOf(shown) {
  const field = (text) => `"${String(text).replaceAll('"', '""')}"`;
  return shown.filter((pane) => pane.view).map(({ view, title }) => {
    const lines = [[title || "query \\ key", ...view.columnGroups.map((group) => group.text)].map(field).join(",")];
    for (let row = 0; row < view.rows; row++) {
      const begin = row * view.columns;
      const cells = Array.from({ length: view.columns }, (_, column) => (view.table.visible[begin + column] ? String(view.table.weights[begin + column]) : ""));
      lines.push([field(view.rowGroups[row].text), ...cells].join(","));
    }
    return lines.join("\r\n");
  }).join("\r\n\r\n");
}

export function saveTable(shown) {
  download(new Blob([tableOf(shown)], { type: "text/csv;charset=utf-8" }), fileName("csv"));
}

export async function savePage(full) {
  state.busy = "Writing the page";
  redraw("top");
  try {
    download(await exportedPage(full), fileName("html"));
  } catch (problem) {
    say(problem);
  }
  state.busy = "";
  redraw("top");
}
