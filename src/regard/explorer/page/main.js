// Starts the page: from a server, or from the run that is stored in an exported file.

import { state, region, redraw, quiet } from "./store.js";
import { LiveSource } from "./live.js";
import { StoredSource } from "./stored.js";
import { start, runModel, say, idle } from "./actions.js";
import { viewOf } from "./view.js";
import { addressIsForeign, readAddress } from "./address.js";
import { drawTop, setTheme, storedTheme } from "./top.js";
import { listenToKeys } from "./keys.js";
import { drawModel, headOnScreen } from "./grid.js";
import { drawHead, drawHover, cellOnScreen } from "./head.js";
import { drawWhy } from "./why.js";
import { drawWhatif } from "./whatif.js";
import { drawCost } from "./cost.js";
import { drawSteps } from "./steps.js";

const stored = document.getElementById("data");
const origin = stored ? new StoredSource(stored.textContent) : new LiveSource(document.querySelector("meta[name=regard-token]")?.content ?? "");
if (stored) stored.textContent = ""; // megabytes of text that are not needed twice

const regionsOfPage = { top: drawTop, model: drawModel, head: drawHead, hover: drawHover, why: drawWhy, whatif: drawWhatif, cost: drawCost, steps: drawSteps };
for (const [name, draw] of Object.entries(regionsOfPage)) region(name, draw);
setTheme(storedTheme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(state.theme));
listenToKeys();
addEventListener("resize", () => redraw("why", "cost")); // the other canvases watch their own size
let started = null;
let labs = null;

// The page that the address names: a model's attention, or the lab, whose modules are fetched when it is first opened.
async function openPlace() {
  state.lab = origin.live && /^#lab(\/|\?|$)/.test(location.hash);
  document.body.classList.toggle("inlab", state.lab);
  document.getElementById("lab").hidden = !state.lab;
  redraw();
  if (state.lab) {
    labs ??= import("./lab.js");
    await (await labs).openLab(origin);
  } else {
    started ??= start(origin);
    await started;
  }
}

function failed(problem) {
  say(problem);
  redraw();
}

addEventListener("hashchange", () => {
  if (!origin.live) return;
  const first = !started;
  if (state.lab || location.hash.startsWith("#lab")) ready = openPlace().catch(failed);
  if (state.lab || first || !addressIsForeign()) return;
  Object.assign(state, { words: false, special: false, contrast: false, sort: "layer", view: "both", scope: "head", changes: [], compare: { kind: "none", value: "" } });
  runModel(readAddress());
});

let ready = openPlace().catch(failed);

// Until nothing is computed, asked for or waiting to be drawn.
async function settled() {
  let opened = null;
  do {
    opened = ready;
    await opened;
    await quiet();
    await new Promise((resolve) => setTimeout(resolve, 10)); // a click on a link is heard after it
  } while (opened !== ready || !idle());
  await quiet();
}

// For tests and scripts: what is shown, and the number behind a cell (positions of tokens, not of merged words).
window.regard = {
  state, settled, headOnScreen, cellOnScreen,
  valueAt(row, column) {
    const view = viewOf(state.run);
    if (!view || view.preview) return null;
    const index = row * view.data.columns + column;
    return view.data.visible[index] ? view.data.weights[index] : "masked";
  },
};
