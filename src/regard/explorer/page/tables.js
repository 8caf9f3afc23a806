// Arithmetic on tables of weights: merged tokens, what is shown of them, softmax at another beta, sums over tokens.

// Weights between groups of tokens: the sum over the keys of a group, the mean over its queries.
export function grouped(data, rowGroups, columnGroups) {
  const [rows, columns] = [rowGroups.length, columnGroups.length];
  if (rows === data.rows && columns === data.columns) return data;
  const weights = new Float32Array(rows * columns);
  const visible = new Uint8Array(rows * columns);
  const exact = typeof data.exact === "boolean" ? data.exact : new Uint8Array(rows * columns);
  for (let row = 0, at = 0; row < rows; row++) {
    const queries = rowGroups[row].tokens;
    for (let column = 0; column < columns; column++, at++) {
      let sum = 0, seen = 0, certain = 1;
      for (const query of queries) {
        for (const key of columnGroups[column].tokens) {
          const i = query * data.columns + key;
          sum += data.weights[i];
          seen |= data.visible[i];
          if (typeof data.exact !== "boolean") certain &= data.exact[i];
        }
      }
      weights[at] = sum / queries.length;
      visible[at] = seen;
      if (typeof exact !== "boolean") exact[at] = certain;
    }
  }
  return { rows, columns, weights, visible, exact };
}

// The same table with cells below `threshold`, and those not among the `top` of their row, set to 0.
export function filtered(table, threshold, top) {
  if (!threshold && !(top && top < table.columns)) return table;
  const weights = new Float32Array(table.weights.length);
  for (let row = 0; row < table.rows; row++) {
    const begin = row * table.columns;
    const cells = table.weights.subarray(begin, begin + table.columns);
    let least = threshold;
    if (top && top < table.columns) least = Math.max(least, cells.map(Math.abs).toSorted()[table.columns - top]);
    for (let column = 0; column < table.columns; column++) {
      if (Math.abs(cells[column]) >= least) weights[begin + column] = cells[column];
    }
  }
  return { ...table, weights };
}

const STEPS = 64, LOWEST = 25; // exp(-25) is below what float32 can add to 1
const POWERS = Float64Array.from({ length: STEPS * LOWEST + 1 }, (_, step) => Math.exp(-step / STEPS));

// exp(-x) for x from 0: a table and four terms of the series, to 1e-11. The dial needs a quarter of a million per frame.
function powerOf(x) {
  if (!(x < LOWEST)) return 0;
  const step = (x * STEPS) | 0, rest = x - step / STEPS;
  return POWERS[step] * (1 - rest * (1 - rest * (1 / 2 - rest * (1 / 6 - rest / 24))));
}

// softmax(beta·product + bias) over the visible keys; beta = Infinity shares the weight among the largest products.
export function softmaxAt(scores, beta, weights) {
  const { rows, columns, products, visible } = scores;
  scores.largest ??= largestProducts(scores);
  for (let row = 0; row < rows; row++) {
    const begin = row * columns, end = begin + columns;
    let sum = 0;
    if (beta === Infinity) {
      for (let i = begin; i < end; i++) sum += weights[i] = visible[i] && products[i] === scores.largest[row] ? 1 : 0;
    } else if (scores.bias || scores.softcap) {
      sum = exponentials(scores, beta, weights, begin, end);
    } else {
      // The largest product has the largest score for every beta: no second pass over the row.
      const shift = beta * scores.largest[row];
      for (let i = begin; i < end; i++) sum += weights[i] = visible[i] ? powerOf(shift - beta * products[i]) : 0;
    }
    const share = sum > 0 ? 1 / sum : 0;
    for (let i = begin; i < end; i++) weights[i] *= share;
  }
  return { rows, columns, weights, visible, exact: true };
}

function largestProducts({ rows, columns, products, visible }) {
  const largest = new Float32Array(rows).fill(-Infinity);
  for (let i = 0; i < products.length; i++) {
    const row = Math.floor(i / columns);
    if (visible[i] && products[i] > largest[row]) largest[row] = products[i];
  }
  return largest;
}

// exp(score - largest score) of a row with softcap or bias, and their sum.
function exponentials({ products, bias, softcap, visible }, beta, weights, begin, end) {
  let largest = -Infinity, sum = 0;
  for (let i = begin; i < end; i++) {
    let score = beta * products[i];
    if (softcap) score = softcap * Math.tanh(score / softcap);
    if (bias) score += bias[i];
    weights[i] = score;
    if (visible[i] && weights[i] > largest) largest = weights[i];
  }
  for (let i = begin; i < end; i++) sum += weights[i] = visible[i] ? Math.exp(weights[i] - largest) : 0;
  return sum;
}

// Sums over several rows: a number for each column; over several columns: a number for each row.
export function sumOfRows(table, chosen) {
  const sums = new Float32Array(table.columns);
  for (const row of chosen) {
    for (let column = 0; column < table.columns; column++) sums[column] += table.weights[row * table.columns + column];
  }
  return sums;
}

export function sumOfColumns(table, chosen) {
  const sums = new Float32Array(table.rows);
  for (let row = 0; row < table.rows; row++) {
    for (const column of chosen) sums[row] += table.weights[row * table.columns + column];
  }
  return sums;
}

// Indices of the largest numbers, largest first.
export function strongest(numbers, most) {
  return Array.from(numbers.keys()).sort((a, b) => Math.abs(numbers[b]) - Math.abs(numbers[a])).slice(0, most);
}

export function largestOf(weights) {
  let most = 0;
  for (let i = 0; i < weights.length; i++) if (Math.abs(weights[i]) > most) most = Math.abs(weights[i]);
  return most;
}
