// 8-bit codes of weights: by square root, so that small weights keep their differences; one code means "masked".

export const MASKED = 255;
export const NEGATIVE = 256; // levels from here on are codes of negative weights, which some mechanisms have
const LARGEST_CODE = 254;

export function weightOfCode(code) {
  return (code / LARGEST_CODE) ** 2;
}

// The level of each cell: a code, MASKED, or NEGATIVE + a code; `most` is the weight of the strongest colour.
export function levelsOf(weights, visible, most, levels = new Uint16Array(weights.length)) {
  const scale = LARGEST_CODE ** 2 / most;
  for (let i = 0; i < weights.length; i++) {
    const weight = weights[i];
    if (!visible[i]) levels[i] = MASKED;
    else if (weight >= 0) levels[i] = weight >= most ? LARGEST_CODE : Math.sqrt(weight * scale) + 0.5;
    else levels[i] = NEGATIVE + (-weight >= most ? LARGEST_CODE : Math.sqrt(-weight * scale) + 0.5);
  }
  return levels;
}
