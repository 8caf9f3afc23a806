// A place to draw on: one canvas for data, one above it for what follows the pointer, so that hovering redraws little.

export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

export class Surface {
  constructor(name, resized) {
    this.element = document.createElement("div");
    this.element.className = "surface";
    this.base = document.createElement("canvas");
    this.over = document.createElement("canvas");
    this.over.tabIndex = 0;
    this.over.dataset.surface = name;
    this.element.append(this.base, this.over);
    this.width = this.height = 0;
    this.drawnFor = null;
    new ResizeObserver(([entry]) => {
      const { width, height } = entry.contentRect;
      if (width === this.width && height === this.height) return;
      [this.width, this.height] = [width, height];
      this.drawnFor = null;
      resized();
    }).observe(this.element);
  }

  // A cleared context of the data's canvas, in CSS pixels; null while there is no room.
  data() { return cleared(this.base, this.width, this.height); }
  overlay() { return cleared(this.over, this.width, this.height); }

  describe(words) {
    if (this.over.getAttribute("aria-label") !== words) this.over.setAttribute("aria-label", words);
  }
}

export function cleared(canvas, width, height, ratio = window.devicePixelRatio || 1) {
  if (width < 2 || height < 2) return null;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.direction = "ltr";
  return context;
}

const widths = new WeakMap();

// The width of the widest name of an axis, in the font that is set; of very long axes, of those that begin it.
export function widestName(context, groups) {
  const known = widths.get(groups);
  if (known?.font === context.font) return known.width;
  const width = groups.slice(0, 400).reduce((most, group) => Math.max(most, context.measureText(group.text).width), 8);
  widths.set(groups, { font: context.font, width });
  return width;
}

// The text, cut with an ellipsis where it is wider than `room`.
export function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Array.from(text);
  let [low, high] = [0, letters.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${letters.slice(0, middle).join("")}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low ? `${letters.slice(0, low).join("")}…` : "…";
}
