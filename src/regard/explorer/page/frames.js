// The binary framing of answers: uint32 length, JSON, uint32 length, data; little-endian, one frame after another.

const decoder = new TextDecoder();

export class FrameReader {
  constructor() {
    this.parts = [];
    this.size = 0;
  }

  // The frames that are complete once `bytes` have come.
  push(bytes) {
    if (bytes.length) this.parts.push(bytes);
    this.size += bytes.length;
    const frames = [];
    while (this.size >= 8) {
      const text = new DataView(this.#peek(4)).getUint32(0, true);
      if (this.size < 8 + text) break;
      const data = new DataView(this.#peek(8 + text)).getUint32(4 + text, true);
      if (this.size < 8 + text + data) break;
      const whole = this.#take(8 + text + data);
      const message = JSON.parse(decoder.decode(whole.subarray(4, 4 + text)));
      frames.push({ ...message, data: whole.slice(8 + text) });
    }
    return frames;
  }

  #peek(size) {
    if (this.parts[0].length < size) this.parts = [joined(this.parts)];
    return this.parts[0].slice(0, size).buffer;
  }

  #take(size) {
    if (this.parts[0].length < size) this.parts = [joined(this.parts)];
    const first = this.parts[0];
    this.parts[0] = first.subarray(size);
    if (!this.parts[0].length) this.parts.shift();
    this.size -= size;
    return first.subarray(0, size);
  }
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

// Weights and what is visible, of a `head` frame.
export function weightsOf(message) {
  const cells = message.rows * message.columns;
  const weights = new Float32Array(message.data.buffer, 0, cells);
  const visible = message.data.length > 4 * cells ? message.data.subarray(4 * cells) : new Uint8Array(cells).fill(1);
  return { rows: message.rows, columns: message.columns, weights, visible, exact: true };
}

// Products q·k, bias and what is visible, of a `scores` frame.
export function scoresOf(message, rows, columns) {
  const cells = rows * columns;
  const products = new Float32Array(message.data.buffer, 0, cells);
  const bias = message.has_bias ? new Float32Array(message.data.buffer, 4 * cells, cells) : null;
  const visible = message.data.subarray((bias ? 8 : 4) * cells);
  return { rows, columns, products, bias, visible, scale: message.scale, softcap: message.softcap };
}
