// The keyboard: arrows, Enter, Esc, ?, and the brackets for the heads before and after.

import { state } from "./store.js";
import { moveFocus, lockFocus, release, stepHead } from "./head.js";
import { moveAmongHeads } from "./grid.js";
import { showHelp, helpIsOpen } from "./help.js";
import { hideTip } from "./tip.js";

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function isWriting(element) {
  return element?.matches?.("input, textarea, select");
}

export function listenToKeys() {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || helpIsOpen() || state.lab) return;
    if (event.key === "Escape") {
      if (isWriting(document.activeElement)) document.activeElement.blur();
      hideTip();
      release();
      return;
    }
    if (isWriting(document.activeElement) || !state.opened) return;
    if (event.key === "?") showHelp();
    else if (event.key === "[") stepHead(-1);
    else if (event.key === "]") stepHead(1);
    else if (event.key in ARROWS) {
      const among = document.activeElement?.id === "heads" ? moveAmongHeads : moveFocus;
      among(...ARROWS[event.key]);
    } else if (event.key === "Enter" && !document.activeElement?.matches("button, a")) lockFocus();
    else return;
    event.preventDefault();
  });
}
