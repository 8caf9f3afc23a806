// Runs in the page before its own scripts: when what was asked for is on the screen. `frame` resolves after a paint.
window.probe = (() => {
  const frame = () => new Promise((resolve) => requestAnimationFrame(() => resolve(performance.now())));
  const painted = async () => { await frame(); return frame(); };
  const times = { origin: performance.timeOrigin };
  const call = window.fetch;
  window.fetch = (address, ...rest) => {
    if (String(address).endsWith("api/run")) times.asked ??= performance.now();
    return call(address, ...rest);
  };

  async function watch() {
    const mark = async (name, reached) => {
      while (!reached()) await frame();
      times[name] ??= await frame();
    };
    await mark("answered", () => window.regard?.state.run);
    await mark("first", () => regard.state.run.layers.some((layer) => layer.loaded));
    await mark("last", () => regard.state.run.layers.every((layer) => layer.loaded));
    await mark("all", () => regard.state.opened && regard.valueAt(0, 0) !== null);
    await mark("whole", () => regard.state.run.layers.every((layer) => layer.entropy));
  }
  watch();

  // Milliseconds from each event of a kind to the frame after its paint.
  function follow(kind) {
    const list = [];
    const take = (event) => {
      const from = kind === "pointermove" ? event.timeStamp : performance.now();
      painted().then((until) => list.push(until - from));
    };
    addEventListener(kind, take, true);
    return { list, stop: () => removeEventListener(kind, take, true) };
  }

  // Milliseconds from the next click until `reached`, and painted.
  function afterClick(reached) {
    return new Promise((resolve) => addEventListener("click", async () => {
      const from = performance.now();
      while (!reached()) await frame();
      resolve(await painted() - from);
    }, { capture: true, once: true }));
  }

  return { times, follow, afterClick, frame };
})();
