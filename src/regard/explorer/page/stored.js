// The source of an exported page: a run's frames inside the page. Numbers that were not stored exactly are marked so.

import { FrameReader } from "./frames.js";
import { weightOfCode, MASKED } from "./codes.js";

const NOT_HERE = "This is a saved page: it shows what was stored. For more, start the explorer with `regard view`.";

export class StoredSource {
  constructor(text) {
    this.text = text;
    this.live = false;
    this.cells = new Map();
    this.codes = new Map();
    this.frames = [];
    this.rollouts = null;
  }

  async #read() {
    if (this.frames.length) return;
    const zipped = Uint8Array.from(atob(this.text.trim()), (letter) => letter.charCodeAt(0));
    this.text = "";
    const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    for (const message of new FrameReader().push(bytes)) {
      const place = `${message.layer}:${message.head}`;
      if (message.type === "top") this.cells.set(place, message.data);
      else if (message.type === "codes") this.codes.set(place, message);
      else this.frames.push(message);
    }
  }

  async models() {
    await this.#read();
    const info = this.frames.find((message) => message.type === "run");
    const model = { name: info.model, title: info.title ?? info.model, kind: info.kind, installed: true, example: info.input };
    return { models: [model], mechanisms: [], pictures: [], version: info.version ?? "" };
  }

  async run(body, take) {
    await this.#read();
    for (const message of this.frames) take(message);
  }

  async head(run, layer, head) {
    const { rows, columns, heads } = run.layers[layer];
    if (typeof head === "number") return this.#headOf(run, layer, head);
    const all = Array.from({ length: heads }, (_, index) => this.#headOf(run, layer, index));
    const weights = new Float32Array(rows * columns);
    for (const one of all) {
      for (let i = 0; i < weights.length; i++) {
        weights[i] = head === "max" ? Math.max(weights[i], one.weights[i]) : weights[i] + one.weights[i] / heads;
      }
    }
    return { rows, columns, weights, visible: all[0].visible, exact: false };
  }

  #headOf(run, layer, head) {
    const { rows, columns, size, codes, causal, pool } = run.layers[layer];
    const weights = new Float32Array(rows * columns);
    const visible = new Uint8Array(rows * columns).fill(1);
    const exact = new Uint8Array(rows * columns);
    const full = this.codes.get(`${layer}:${head}`)?.data;
    const [high, wide] = full ? [rows, columns] : size;
    const [down, across] = full ? [1, 1] : pool;
    const levels = full ?? codes.subarray(head * high * wide, (head + 1) * high * wide);
    for (let row = 0, i = 0; row < rows; row++) {
      const from = Math.floor(row / down) * wide;
      for (let column = 0; column < columns; column++, i++) {
        const code = levels[from + Math.floor(column / across)];
        if (code === MASKED || (causal && column > row + columns - rows)) visible[i] = 0;
        else weights[i] = weightOfCode(code);
      }
    }
    const stored = this.cells.get(`${layer}:${head}`);
    if (stored) {
      const view = new DataView(stored.buffer, stored.byteOffset, stored.byteLength);
      for (let at = 0; at < stored.length; at += 8) {
        const i = view.getUint16(at, true) * columns + view.getUint16(at + 2, true);
        weights[i] = view.getFloat32(at + 4, true);
        exact[i] = 1;
      }
    }
    return { rows, columns, weights, visible, exact };
  }

  async rollout() { throw new Error(NOT_HERE); }
  async scores() { throw new Error(NOT_HERE); }
  async why() { throw new Error(NOT_HERE); }
  async cost() { throw new Error(NOT_HERE); }
  async effects() { throw new Error(NOT_HERE); }
  async generate() { throw new Error(NOT_HERE); }
  async page() { throw new Error(NOT_HERE); }
}
