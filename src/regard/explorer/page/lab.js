// The lab: statements about attention, and what the library measures of them with the parameters that are chosen here.

import { html, render, nothing } from "./vendor/lit-html.js";
import { state, region, redraw, awaited } from "./store.js";
import { drawParameters } from "./labparameters.js";

const PATIENCE = 700; // milliseconds that a measurement has after a newer one was asked for
const LANE = Math.random().toString(36).slice(2); // of this page's measurements only the newest goes on
const MARKS = {
  holds: ["✓", "good"], "holds under a condition": ["≈", "partly"], "does not hold": ["✗", "bad"],
  undecided: ["?", ""], "measured here": ["◷", ""], "not run": ["–", ""],
};

let source = null;
let experiments = null;
let seconds = 0;
const lab = { id: "", values: {}, search: "", table: "checks", error: "", stale: false };
const outcomes = new Map();
const pictures = new Map(); // of an outcome, the address of its picture
const markup = new Map();

export async function openLab(origin) {
  source = origin;
  if (!experiments) {
    const [answer] = await Promise.all([source.lab(), styled()]);
    ({ experiments, seconds } = answer);
    region("lab", drawLab);
    addEventListener("keydown", pressed);
  }
  readPlace();
}

function styled() {
  const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "page/lab.css" });
  document.head.append(link);
  return new Promise((resolve) => { link.onload = link.onerror = resolve; });
}

// The experiment and the parameters that the address names; those that it does not name have their defaults.
function readPlace() {
  const [place, query] = location.hash.slice(1).split("?");
  const id = decodeURIComponent(place.split("/")[1] ?? "") || experiments[0]?.id;
  const chosen = named(id);
  lab.id = id;
  lab.values = {};
  for (const parameter of chosen?.parameters ?? []) lab.values[parameter.name] = [...parameter.default];
  for (const [name, value] of new URLSearchParams(query ?? "")) lab.values[name] = value.split(",");
  measure();
}

function writePlace() {
  const fields = new URLSearchParams();
  for (const { name, default: usual } of named(lab.id).parameters) {
    if (String(lab.values[name]) !== String(usual)) fields.set(name, lab.values[name].join());
  }
  const query = String(fields).replaceAll("%2C", ",");
  history.replaceState(null, "", `#lab/${lab.id}${query ? `?${query}` : ""}`);
}

function named(id) {
  return experiments.find((experiment) => experiment.id === id);
}

function setValues(name, words) {
  lab.values = { ...lab.values, [name]: words };
  writePlace();
  measure();
}

function setDefaults() {
  for (const { name, default: usual } of named(lab.id).parameters) lab.values[name] = [...usual];
  writePlace();
  measure();
}

let running = null; // the measurement under way
let wanted = null; // the newest after it; those between are dropped

function measure() {
  wanted = { id: lab.id, parameters: lab.values, lane: LANE };
  lab.stale = true;
  redraw("lab");
  if (!running) return awaited(measureAll());
  if (running.id !== lab.id) running.control.abort();
  else hurry();
}

// While a hand drags, what is fast is shown at every stop; what is slow gives way to the newest.
function hurry() {
  clearTimeout(running.timer);
  const left = running.since + PATIENCE - performance.now();
  running.timer = setTimeout(() => wanted && running?.control.abort(), Math.max(0, left));
}

async function measureAll() {
  while (wanted) {
    const asked = wanted;
    wanted = null;
    running = { id: asked.id, control: new AbortController(), since: performance.now(), timer: 0 };
    try {
      const outcome = await source.experiment(asked, running.control.signal);
      outcomes.set(asked.id, outcome);
      if (!wanted) Object.assign(lab, { error: "", stale: false });
    } catch (problem) {
      if (!wanted) Object.assign(lab, { error: problem.name === "AbortError" ? "Stopped." : problem.message, stale: true });
    }
    clearTimeout(running.timer);
    redraw("lab");
  }
  running = null;
  redraw("lab");
}

function stop() {
  running?.control.abort();
}

// HTML that the server made of an experiment's own statement, once for each.
function ofMarkup(text, kind) {
  const key = `${kind} ${text}`;
  if (!markup.has(key)) {
    const box = document.createElement("div");
    box.className = kind;
    box.innerHTML = text;
    markup.set(key, box);
  }
  return markup.get(key);
}

function pictureOf(outcome) {
  if (!outcome?.picture) return null;
  if (pictures.get(lab.id)?.outcome !== outcome) {
    if (pictures.has(lab.id)) URL.revokeObjectURL(pictures.get(lab.id).address);
    pictures.set(lab.id, { outcome, address: URL.createObjectURL(new Blob([outcome.picture], { type: "image/svg+xml" })) });
  }
  return pictures.get(lab.id).address;
}

function drawLab() {
  const chosen = named(lab.id);
  const outcome = outcomes.get(lab.id);
  document.title = `${chosen?.title ?? "Lab"} · Regard`;
  render(html`
    <nav id="labs" class="panel" aria-label="Experiments">
      <input id="labsearch" type="search" placeholder="Search ( / )" aria-label="Search the experiments" .value=${lab.search} @input=${(event) => { lab.search = event.target.value; redraw("lab"); }}>
      <div id="lablist">${list()}</div>
    </nav>
    <article id="labmain" class="panel">${chosen ? statement(chosen, outcome) : html`<p class="empty">${lab.error || "Choose an experiment on the left."}</p>`}</article>
    <div id="labside">
      <section id="labparameters" class="card" aria-label="Parameters">${chosen ? drawParameters(chosen, lab.values, setValues, setDefaults) : nothing}${chosen && lab.error ? html`<p id="laberror" class="problem" role="alert">${lab.error}</p>` : nothing}</section>
      <section id="labresult" class="card" aria-label="What was measured">${chosen ? numbers(outcome) : nothing}</section>
    </div>`, document.getElementById("lab"));
}

function matching() {
  const words = lab.search.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (experiment) => `${experiment.id} ${experiment.title} ${experiment.claims.join(" ")} ${experiment.statement.replace(/<[^>]*>/g, "")}`.toLowerCase();
  return experiments.filter((experiment) => words.every((word) => text(experiment).includes(word)));
}

function list() {
  const shown = matching();
  if (!shown.length) return html`<p class="empty">Nothing has these words.</p>`;
  return [...new Set(shown.map((experiment) => experiment.document))].map((title) => html`<h2>${title}</h2>${shown.filter((experiment) => experiment.document === title).map(entry)}`);
}

function entry({ id, title, claims }) {
  const [mark, kind] = MARKS[outcomes.get(id)?.verdict] ?? ["", ""];
  return html`<a href=${`#lab/${id}`} data-experiment=${id} aria-current=${id === lab.id ? "true" : nothing} title=${claims.join(", ")}><span class=${`mark ${kind}`} aria-hidden="true">${mark}</span><span>${title}</span></a>`;
}

function statement(chosen, outcome) {
  const [mark, kind] = MARKS[outcome?.verdict] ?? ["", ""];
  const busy = running && lab.stale;
  return html`
    <div class="heading"><h1>${chosen.title}</h1><span class="quiet">${chosen.claims.join(", ")}</span>
      <span class="push"></span>${busy ? html`<span class="spin" aria-hidden="true"></span><span class="quiet" role="status">measuring</span><button id="labstop" @click=${stop}>stop</button>` : nothing}
      ${outcome ? html`<span id="verdict" class=${`verdict ${kind}`} role="status"><span aria-hidden="true">${mark}</span>${outcome.verdict}</span>` : nothing}</div>
    ${ofMarkup(chosen.statement, "statement")}
    ${ofMarkup(chosen.formula, "formula")}
    ${outcome?.reading ? ofMarkup(outcome.reading, "reading") : nothing}
    <div class=${`shot ${lab.stale ? "old" : ""}`}>${pictureOf(outcome) ? html`<img id="labpicture" src=${pictureOf(outcome)} alt=${`${chosen.title}: ${outcome.verdict}, ${counted(outcome)}`}>` : html`<p class="empty">${outcome ? nothing : lab.error ? nothing : `Measuring, for ${seconds} seconds at most…`}</p>`}</div>`;
}

function counted({ checks }) {
  const results = checks.map((check) => check.result).filter((result) => result !== "measured here");
  return results.length ? `${results.filter((result) => result === "passed").length} of ${results.length} checks passed` : "times, measured here";
}

function numbers(outcome) {
  const choose = (name, words) => html`<button data-table=${name} aria-pressed=${lab.table === name} @click=${() => { lab.table = name; redraw("lab"); }}>${words}</button>`;
  if (!outcome?.checks.length) return html`<h2>Checks</h2>`;
  return html`
    <h2><span id="counted">${counted(outcome)}</span><span class="quiet plain">${outcome.seconds.toFixed(1)} s</span><span class="group push" role="group" aria-label="Numbers">${choose("checks", "checks")}${outcome.rows.length ? choose("table", "table") : nothing}</span></h2>
    <div class="numbers" tabindex="0">${lab.table === "checks" || !outcome.rows.length ? checksTable(outcome) : measuredTable(outcome)}</div>`;
}

function checksTable({ checks }) {
  const groups = [...new Set(checks.map((check) => check.of))];
  return html`<table id="checks"><thead><tr><th class="what" scope="col">check</th><th scope="col">predicted</th><th scope="col">measured</th></tr></thead>
    ${groups.map((group) => html`<tbody>${groups.length > 1 || group !== "the statement" ? html`<tr class="of"><td colspan="3">${group}</td></tr>` : nothing}${checks.filter((check) => check.of === group).map(checkRow)}</tbody>`)}</table>`;
}

function checkRow(check) {
  const sign = { passed: "✓", failed: "✗", undecided: "?" }[check.result] ?? "–", good = check.result === "passed", bad = check.result === "failed";
  return html`<tr title=${`${check.result}; tolerance ${check.tolerance}${check.interval ? `, interval ${check.interval}` : ""}`}><td class="what"><span class=${good ? "good" : bad ? "bad" : "quiet"} aria-label=${check.result}>${sign}</span> ${check.what}</td><td>${check.predicted}</td><td>${check.measured}</td></tr>`;
}

function measuredTable({ columns, rows, left_out: more }) {
  return html`<table id="measured"><thead><tr>${columns.map((column) => html`<th scope="col">${column}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((value) => html`<td>${value}</td>`)}</tr>`)}</tbody></table>${more ? html`<p class="quiet">… ${more} more rows</p>` : nothing}`;
}

// "/" searches; arrows move among the experiments, Enter opens, Esc leaves the search.
function pressed(event) {
  if (!state.lab || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = document.activeElement;
  const writing = at?.matches?.("input, textarea, select");
  const links = [...document.querySelectorAll("#lablist a")];
  if (event.key === "/" && !writing) document.getElementById("labsearch").focus();
  else if (event.key === "Escape" && writing) at.blur();
  else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && (at?.id === "labsearch" || at?.closest?.("#lablist"))) {
    links[Math.min(links.length - 1, Math.max(0, links.indexOf(at) + (event.key === "ArrowDown" ? 1 : -1)))]?.focus();
  } else if (event.key === "Enter" && at?.id === "labsearch") links[0]?.click();
  else return;
  event.preventDefault();
}
