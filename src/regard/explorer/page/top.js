// The bar on top: which model reads what, what it is compared with, and what the page is doing.

import { html, render, nothing } from "./vendor/lit-html.js";
import { state, redraw } from "./store.js";
import { runModel, openFolder, compareWith, modelNamed, exampleOf, cancel } from "./actions.js";
import { addressOfModel } from "./address.js";
import { isDark } from "./colours.js";
import { showHelp } from "./help.js";

const FOLDER = "…folder";
const MOST_PICTURE = 6e6; // bytes of a picture file

export function drawTop() {
  const model = modelNamed(state.model);
  if (!state.lab) document.title = `${model?.title ?? "Regard"} · Regard`;
  document.getElementById("head").setAttribute("aria-busy", String(Boolean(state.busy)));
  const brand = html`<a class="brand" href="#" aria-label="Regard" @click=${(event) => event.preventDefault()}><svg viewBox="0 0 16 16" width="20" height="20" aria-hidden="true"><path d="M1 8q7-9 14 0q-7 9-14 0z" fill="none" stroke="currentColor" stroke-width="1.4"/><circle cx="8" cy="8" r="2.6" class="pupil"/></svg>Regard</a>${state.live ? pagesOf() : nothing}`;
  const theme = html`<button id="theme" type="button" class="icon" aria-label=${isDark(state.theme) ? "Light colours" : "Dark colours"} title="Light or dark" @click=${switchTheme}>${isDark(state.theme) ? "☀" : "☾"}</button>`;
  if (state.lab) return render(html`<div class="bar">${brand}<span class="note">statements about attention, measured by the library</span><span class="push"></span>${theme}</div>${message(null)}`, document.getElementById("top"));
  render(html`
    <form class="bar" @submit=${submitted}>
      ${brand}
      ${state.live ? html`<select id="menu" aria-label="Model" title="Which model reads the text" @change=${chosen}>${state.models.map((each) => html`<option value=${each.name} title=${each.note ?? ""} ?selected=${each.name === state.model}>${each.title}${each.installed ? "" : " (not installed)"}</option>`)}<option value=${FOLDER}>a folder…</option></select>${state.asksFolder ? html`<input id="folder" type="text" spellcheck="false" aria-label="Path of a checkpoint" placeholder="folder or .gguf file, then Enter" @keydown=${folderNamed}>` : nothing}` : html`<span class="saved">${model?.title ?? state.model}</span>`}
      ${inputs(model)}
      ${state.live ? html`<button id="run" class="primary" type="submit" ?disabled=${model && !model.installed} title="Run the model (Enter)">Run</button>${compare()}` : html`<span class="note">A saved page. To run models: <code>regard view</code></span>`}
      ${theme}
      <button id="helpbutton" type="button" class="icon" aria-label="Help" title="Keys and words ( ? )" @click=${showHelp}>?</button>
    </form>
    ${message(model)}`, document.getElementById("top"));
}

function pagesOf() {
  const page = (address, words, here) => html`<a href=${address} aria-current=${here ? "page" : nothing}>${words}</a>`;
  return html`<nav class="pages" aria-label="Pages">${page(addressOfModel(), "Model", !state.lab)}${page("#lab", "Lab", state.lab)}</nav>`;
}

function message(model) {
  if (state.error) return html`<div class="message error" role="alert"><span id="error">${state.error}</span><button type="button" aria-label="Close" @click=${() => { state.error = ""; redraw("top"); }}>×</button></div>`;
  if (model && !model.installed) return html`<div class="message" role="status"><span>${model.title} is not here yet. Install it with</span><code>${model.install}</code></div>`;
  return state.busy ? html`<div class="message busy" role="status"><span class="spin" aria-hidden="true"></span><span>${state.busy}…</span><button type="button" id="stop" @click=${cancel}>stop</button></div>` : nothing;
}

function inputs(model) {
  const kind = model?.kind ?? "text";
  if (!state.live && !Object.values(state.input).some(Boolean)) return html`<span class="push"></span>`; // a trace alone
  if (kind === "image") return pictures();
  const write = (name) => (event) => { state.input = { ...state.input, [name]: event.target.value }; };
  const area = (name, label, hint) => html`<textarea id=${name} rows="1" spellcheck="false" dir="auto" aria-label=${label} placeholder=${hint} ?readonly=${!state.live} .value=${state.input[name] ?? ""} @input=${write(name)} @keydown=${entered}></textarea>`;
  if (kind === "pair") return html`${area("source", "Source", "A sentence to translate")}<span class="arrow" aria-hidden="true">→</span>${area("target", "Target", state.base?.done?.text && !state.input.target ? `${state.base.done.text} (the model’s)` : "empty: the model translates")}`;
  return area("text", "Text", "Write a sentence, then press Enter");
}

function pictures() {
  const own = state.input.image && !state.pictures.includes(state.input.image);
  return html`<select id="picture" aria-label="Picture" @change=${(event) => { state.input = { image: event.target.value }; runModel(); }}>${own ? html`<option selected>your picture</option>` : nothing}${state.pictures.map((name) => html`<option value=${name} ?selected=${state.input.image === name}>${name}</option>`)}</select>
    <label class="file">open a picture<input id="file" type="file" accept="image/png,image/jpeg" @change=${opened}></label><span class="push"></span>`;
}

function opened(event) {
  const [file] = event.target.files;
  if (!file) return;
  if (file.size > MOST_PICTURE) {
    state.error = "This picture is larger than 6 MB: choose a smaller one.";
    redraw("top");
    return;
  }
  const reader = new FileReader();
  reader.onload = () => {
    state.input = { image: String(reader.result).split(",")[1] };
    runModel();
  };
  reader.readAsDataURL(file);
}

function entered(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submitted(event);
}

function submitted(event) {
  event.preventDefault();
  if (!state.live) return;
  if ("target" in state.input && !state.input.target?.trim()) state.input = { ...state.input, target: null };
  runModel();
}

function folderNamed(event) {
  if (event.key === "Escape") state.asksFolder = false;
  else if (event.key === "Enter" && event.target.value.trim()) {
    event.preventDefault();
    state.asksFolder = false;
    openFolder(event.target.value.trim());
  } else return;
  redraw("top");
}

function chosen(event) {
  state.asksFolder = event.target.value === FOLDER;
  if (state.asksFolder) {
    event.target.value = state.model;
    redraw("top");
    setTimeout(() => document.getElementById("folder")?.focus(), 50);
    return;
  }
  state.model = event.target.value;
  const model = modelNamed(state.model);
  state.input = exampleOf(model);
  if (state.compare.kind !== "twin") state.compare = { kind: "none", value: "" };
  redraw("top");
  if (model.installed) runModel();
}

function compare() {
  const { kind, value } = state.compare;
  const choices = [["none", "nothing"], ...(state.changes.length ? [["before", "before a change"]] : []), ["twin", "random twin"], ["mechanism", "another mechanism"], ...(modelNamed(state.model)?.kind === "image" ? [] : [["text", "another text"]])];
  return html`<label class="compare"><span class="long">compare with</span><span class="brief" aria-hidden="true">vs.</span> <select id="compare" aria-label="Compare with" .value=${kind} @change=${(event) => compareWith(event.target.value)}>${choices.map(([name, words]) => html`<option value=${name} ?selected=${name === kind}>${words}</option>`)}</select></label>
    ${kind === "mechanism" ? html`<select id="comparemechanism" aria-label="Mechanism to compare with" @change=${(event) => compareWith("mechanism", event.target.value)}><option value="" ?selected=${!value}>choose…</option>${state.mechanisms.filter((mechanism) => !mechanism.causal || state.run?.layers.every((layer) => layer.causal)).map((mechanism) => html`<option value=${mechanism.name} ?selected=${mechanism.name === value}>${mechanism.title}</option>`)}</select>` : nothing}
    ${kind === "text" ? html`<input id="comparetext" type="text" dir="auto" spellcheck="false" aria-label="Text to compare with" placeholder="the other text, then Enter" .value=${value} @keydown=${(event) => { if (event.key === "Enter") { event.preventDefault(); compareWith("text", event.target.value); } }}>` : nothing}`;
}

function switchTheme() {
  setTheme(isDark(state.theme) ? "light" : "dark");
}

export function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = isDark(theme) ? "dark" : "light";
  try {
    localStorage.setItem("regard-theme", theme);
  } catch {
    // A sandboxed frame or a page from disk may have no storage: the theme lasts as long as the page.
  }
  redraw();
}

export function storedTheme() {
  try {
    return localStorage.getItem("regard-theme") ?? "auto";
  } catch {
    return "auto";
  }
}
