// The help: keys, and what the words and colours mean.

import { html, render } from "./vendor/lit-html.js";
import { LABELS } from "./colours.js";

const KEYS = [
  ["← ↑ → ↓", "move the pair in focus; in the grid of heads, move between heads"],
  ["Enter", "lock the pair in focus"],
  ["Esc", "release it"],
  ["[  ]", "the head before, the next head"],
  ["Shift-click", "add another token: their weights are summed"],
  ["?", "this help"],
];

export function showHelp() {
  const dialog = document.getElementById("help");
  render(html`
    <button id="closehelp" class="close" aria-label="Close" @click=${hideHelp}>×</button>
    <h1>Reading the page</h1>
    <p>Each row of a matrix is a query: how it spreads its attention over the keys. Weights of a row add up to 1 for softmax. <span class="key hatched"></span> Hatched: the mask hides this key, which is not the same as a weight of 0.</p>
    <div class="columns"><div><h2>Keys</h2><dl>${KEYS.map(([key, words]) => html`<dt><kbd>${key}</kbd></dt><dd>${words}</dd>`)}</dl></div>
    <div><h2>Labels of heads</h2><dl>${Object.entries(LABELS).map(([name, { letter, words }]) => html`<dt><span class="chip small" data-label=${name}><b class="letter">${letter}</b>${name}</span></dt><dd>${words}</dd>`)}</dl></div></div>
    <p>A head is labelled only if its weight on a pattern is clearly above chance. The bar under a thumbnail is its entropy: empty for one key, full for all keys alike. Colours follow the square root of a weight, so that small weights can be seen.</p>
    <p>Merged words: the sum over a word’s keys, the mean over its queries. Hidden special tokens keep their weight: the rest is not rescaled.</p>`, dialog);
  if (!dialog.open) dialog.showModal();
}

function hideHelp() {
  document.getElementById("help").close();
}

export function helpIsOpen() {
  return document.getElementById("help").open;
}
