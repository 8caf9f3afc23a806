// The source of a page that a server runs: every answer is computed when it is asked for.

import { FrameReader, weightsOf, scoresOf } from "./frames.js";

export class LiveSource {
  constructor(token) {
    this.token = token;
    this.live = true;
  }

  async #post(name, body, signal) {
    let answer;
    try {
      answer = await fetch(`api/${name}`, {
        method: "POST", body: JSON.stringify(body), signal,
        headers: { "Content-Type": "application/json", "X-Regard-Token": this.token },
      });
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new Error("The server does not answer: is `regard view` still running?");
    }
    if (answer.ok) return answer;
    const reason = await answer.json().catch(() => ({}));
    throw new Error(reason.error ?? `The server refused ${name} (${answer.status}).`);
  }

  async #json(name, body, signal) {
    return (await this.#post(name, body, signal)).json();
  }

  // Calls `take` with each frame as it comes.
  async #frames(name, body, take, signal) {
    const reader = (await this.#post(name, body, signal)).body.getReader();
    const frames = new FrameReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      for (const message of frames.push(value)) {
        if (message.type === "error") throw new Error(message.error);
        take(message);
      }
    }
  }

  async #frame(name, body, signal) {
    let first = null;
    await this.#frames(name, body, (message) => { first ??= message; }, signal);
    if (!first) throw new Error(`The server's answer to ${name} is empty.`);
    return first;
  }

  models(signal) { return this.#json("models", {}, signal); }
  lab() { return this.#json("lab", {}); }
  experiment(body, signal) { return this.#frame("experiment", body, signal); }
  run(body, take, signal) { return this.#frames("run", body, take, signal); }
  effects(run, take, signal) { return this.#frames("effects", { run: run.id }, take, signal); }
  generate(body, take, signal) { return this.#frames("generate", body, take, signal); }

  why(run, position, head, window, query, key, signal) {
    return this.#json("why", { ...place(run, position), head, window, query, key }, signal);
  }

  top(run, position) { return this.#json("top", { run: run.id, position }); }
  cost(run, position, head, signal) { return this.#json("cost", { ...place(run, position), head }, signal); }
  async head(run, position, head, window) { return weightsOf(await this.#frame("head", { ...place(run, position), head, window })); }
  async rollout(run) { return weightsOf(await this.#frame("rollout", { run: run.id })); }

  async scores(run, position, head, window) {
    const { rows, columns } = run.layers[position];
    return scoresOf(await this.#frame("scores", { ...place(run, position), head, window }), rows, columns);
  }

  async page(run, full) { return (await this.#post("export", { run: run.id, full })).blob(); }
}

function place(run, position) {
  return { run: run.id, layer: run.layers[position].index };
}
