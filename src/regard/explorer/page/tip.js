// The tooltip: a few words and exact numbers beside the pointer.

import { render } from "./vendor/lit-html.js";

export function showTip(content, x, y) {
  const tip = document.getElementById("tip");
  render(content, tip);
  tip.hidden = false;
  const { offsetWidth: wide, offsetHeight: high } = tip;
  const left = x + 16 + wide > innerWidth - 4 ? x - wide - 12 : x + 16;
  const top = y + 18 + high > innerHeight - 4 ? y - high - 12 : y + 18;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

export function hideTip() {
  const tip = document.getElementById("tip");
  if (!tip.hidden) tip.hidden = true;
}
