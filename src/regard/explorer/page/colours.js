// Colours of weights, labels and masks. Weights run over one hue, so that they read without colour vision.

import { MASKED, NEGATIVE } from "./codes.js";

// As in the figures of the library (core/display.py); the dark table runs from the dark page to white.
const WEIGHTS = {
  light: ["#ffffff", "#c6dcef", "#6aaed6", "#2171b5", "#08306b"],
  dark: ["#161b22", "#123a63", "#2171b5", "#7fbce6", "#f2f9ff"],
};
const AGAINST = { light: ["#ffffff", "#fdd9b8", "#f0994d", "#c8500a", "#7a2c00"], dark: ["#161b22", "#5a2b0c", "#b3541a", "#f0a060", "#fff3e8"] };
const HATCH = { light: ["#e9ecf0", "#c9d0d8"], dark: ["#222932", "#39424e"] };
const EFFECTS = { light: ["#f4f1ec", "#f6cf9f", "#e8913f", "#b3480b", "#5c1f00"], dark: ["#1b2028", "#54300f", "#a8541a", "#ee9c55", "#fff0e0"] };

// Patterns as inference/tracing/patterns.py colours and letters them (Okabe and Ito's palette).
export const LABELS = {
  previous: { letter: "P", colour: "#0072B2", ink: "#fff", words: "the token before" },
  next: { letter: "N", colour: "#56B4E9", ink: "#000", words: "the token after" },
  first: { letter: "F", colour: "#E69F00", ink: "#000", words: "the first token" },
  separator: { letter: "/", colour: "#D55E00", ink: "#fff", words: "separators such as [SEP]" },
  "same word": { letter: "W", colour: "#009E73", ink: "#fff", words: "other pieces of the same word; across texts, the same word" },
  self: { letter: "S", colour: "#CC79A7", ink: "#000", words: "the token itself" },
  induction: { letter: "I", colour: "#F0E442", ink: "#000", words: "what followed the token earlier" },
  diffuse: { letter: "D", colour: "#999999", ink: "#000", words: "all tokens nearly alike" },
};

export function isDark(theme) {
  return theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function mixed(stops, part) {
  const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const below = Math.min(stops.length - 2, Math.floor(place));
  const [low, high] = [channels(stops[below]), channels(stops[below + 1])];
  return low.map((value, i) => Math.round(value + (high[i] - value) * (place - below)));
}

function packed([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red; // little-endian RGBA
}

const palettes = new Map();

// The colour of each level as a pixel (`pixels`), the two of the hatching (`hatch`), and functions of a share from 0 to 1.
export function palette(dark) {
  const theme = dark ? "dark" : "light";
  if (!palettes.has(theme)) {
    const pixels = new Uint32Array(NEGATIVE + 255);
    for (let code = 0; code < MASKED; code++) {
      pixels[code] = packed(mixed(WEIGHTS[theme], code / 254));
      pixels[NEGATIVE + code] = packed(mixed(AGAINST[theme], code / 254));
    }
    palettes.set(theme, {
      pixels, hatch: HATCH[theme].map((colour) => packed(channels(colour))), hatchColours: HATCH[theme],
      paper: packed(channels(WEIGHTS[theme][0])),
      weight: (part) => `rgb(${mixed(part < 0 ? AGAINST[theme] : WEIGHTS[theme], Math.abs(part))})`,
      effect: (part) => `rgb(${mixed(EFFECTS[theme], part)})`,
      ...(dark
        ? { ink: "#e6ebf1", quiet: "#98a4b1", rule: "#313a45", ground: "#161b22", accent: "#ff9350", line: "#5aa9e0" }
        : { ink: "#1f2933", quiet: "#5b6773", rule: "#d5dbe1", ground: "#ffffff", accent: "#c8500a", line: "#2171b5" }),
    });
  }
  return palettes.get(theme);
}
