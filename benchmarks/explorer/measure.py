"""The explorer's figures, each with its goal: a table, and a JSON file with the machine, versions and commit.

    python benchmarks/explorer/measure.py --out benchmarks/results/explorer.json

Needs Debian's Chromium (`apt-get install -y chromium`) and `pip install playwright`; MiniLM and SmolLM2 are measured
where they are installed (`regard models`), BertViz where it can be fetched. It takes about five minutes.

The model is an encoder of BERT-base's size with random weights: 12 layers of 12 heads. Everything is timed inside of
the page, at 1400 × 900, without a GPU: from a real pointer event to the animation frame after its paint, so that no
time is below one frame. What the model's pass takes is left out where a goal says so.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import browser as pages  # noqa: E402
import peer  # noqa: E402
from playwright.sync_api import Browser, Page  # noqa: E402
from playwright.sync_api import Error as PlaywrightError  # noqa: E402
from subjects import LONG, NAME, SHORT, TOKENS, text  # noqa: E402

from regard.checkpoints.names import NAMES  # noqa: E402
from regard.commands.suite.harness import environment  # noqa: E402
from regard.core.files import write_text  # noqa: E402

SIXTEEN_TOKENS = "The animal did not cross the wide street because it was too tired."
"""16 tokens of MiniLM, [CLS] and [SEP] among them."""


@dataclass(frozen=True)
class Figure:
    """A measured figure."""

    what: str
    value: float
    unit: str
    goal: float
    met: bool
    detail: dict[str, Any]


class Figures:
    """The figures so far; each is printed when it is there."""

    def __init__(self) -> None:
        self.list: list[Figure] = []
        self.left_out: dict[str, str] = {}
        print(f"{'':54}{'measured':>14}{'goal':>14}")

    def add(self, what: str, value: float, unit: str, goal: float, detail: dict[str, Any] | None = None) -> None:
        figure = Figure(what, value, unit, goal, value <= goal, detail or {})
        self.list.append(figure)
        amounts = "".join(f"{f'{amount:,.4g} {unit}':>14}" for amount in (value, goal))
        print(f"{what:54}{amounts}  {'met' if figure.met else 'NOT MET'}", flush=True)

    def leave_out(self, what: str, reason: str) -> None:
        self.left_out[what] = reason
        print(f"{what:54}left out: {reason}", flush=True)


def run_subjects(command: str) -> list[str]:
    return [sys.executable, str(HERE / "subjects.py"), command]


def preparing(figures: Figures) -> None:
    done = subprocess.run(run_subjects("prepare"), capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    what = f"12 × 12 heads × {TOKENS} tokens, beyond the pass"
    figures.add(f"{what}: preparing", measured["seconds"], "s", 2, measured)
    figures.add(f"{what}: memory", measured["bytes"] / 1e6, "MB", 1000)
    figures.add("exported page: thumbnails, largest weights", measured["export_bytes"] / 1e6, "MB", 3)
    figures.add("exported page: all weights", measured["full_export_bytes"] / 1e6, "MB", 40)


@contextmanager
def served() -> Iterator[str]:
    """The address of a server in a process of its own."""
    process = subprocess.Popen(run_subjects("serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.stdin.close()
        process.wait(20)


def page_of_512(figures: Figures, browser: Browser, address: str) -> None:
    with pages.tab(browser) as page:
        where = pages.link(address, model=NAME, text=text(TOKENS))
        pages.opened(page, where)  # the first pass of a server is slower
    with pages.tab(browser) as page:
        measured = pages.opened(page, where)
        sizes = {name: measured[name] for name in ("page_bytes", "page_bytes_unpacked")}
        figures.add("page: HTML, styles, scripts, as it is sent", measured["page_bytes"] / 1e3, "kB", 150, sizes)
        figures.add("received before the first draw", measured["bytes_before_first"] / 1e6, "MB", 1.5, measured)
        figures.add("first draw", measured["first"], "s", 1, measured)
        for what, measure, goal in (
            ("hover to paint, p95", lambda: pages.hovering(page, TOKENS), 50),
            ("another head, p95", lambda: pages.choosing(page), 200),
            ("beta drag, p95", lambda: pages.dragging(page), 33),
        ):
            times = measure()
            figures.add(what, times["p95"], "ms", goal, times)
        weight = pages.burden(page)
        figures.add("DOM nodes", weight["nodes"], "", 5000, weight)
        figures.add("JavaScript heap, with array buffers", weight["heap_bytes"] / 1e6, "MB", 100)


def page_of_1024(figures: Figures, browser: Browser, address: str) -> None:
    with pages.tab(browser) as page:
        measured = pages.opened(page, pages.link(address, model=NAME, text=text(LONG)))
    figures.add(f"{LONG:,} tokens drawn: thumbnails and a head's weights", measured["all"], "s", 2, measured)


def visit(page: Page, address: str, **fields: str) -> None:
    page.goto(pages.link(address, **fields))
    pages.settle(page)


def real_models(figures: Figures, browser: Browser, address: str) -> None:
    with pages.tab(browser) as page:
        visit(page, address, model="translator", source="La voiture rouge est rapide.")
        times = pages.intervening(page)
        figures.add("intervene → output: translator, whole sentence", times["median"], "ms", 300, times)
    for name in ("minilm", "smollm2"):
        if NAMES[name].find() is None:
            figures.leave_out(name, f"not installed: {NAMES[name].command}")
            continue
        with pages.tab(browser) as page:
            visit(page, address, model=name, text=SIXTEEN_TOKENS)
            tokens = page.evaluate("regard.state.run.info.tokens.length")
            if name == "minilm":
                times = pages.intervening(page)
                figures.add(f"intervene → output: MiniLM, {tokens} tokens", times["median"], "ms", 150, times)
                effects = pages.silencing(page)
                what = f"all {effects['heads']} heads of MiniLM silenced"
                figures.add(what, effects["seconds"], "s", 3, effects)
            else:
                seconds = pages.cancelling(page)
                figures.add("SmolLM2's effects cancelled: the next answer after", seconds, "s", 2)
                effects = pages.silencing(page)
                what = f"all {effects['heads']} heads of SmolLM2, with a bar: {effects['bar']}"
                figures.add(what, effects["seconds"], "s", 60, effects | {"tokens": tokens})


def beside(browser: Browser) -> dict[str, Any]:
    """BertViz on the same weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            peer.fetch(folder)
        except (subprocess.SubprocessError, OSError) as error:
            return {"version": peer.VERSION, "reason": f"could not be fetched: {type(error).__name__}"}
        rows = []
        for tokens in (SHORT, TOKENS):
            row = peer.measure(browser, folder, tokens)
            rows.append(row)
            size = f"{row['bytes'] / 1e6:,.0f} MB" if "bytes" in row else "–"
            drawn = f"first draw {row['first_draw_seconds']:.1f} s" if "first_draw_seconds" in row else row["reason"]
            print(f"{f'BertViz model view, 12 × 12 × {tokens} tokens':54}{size:>14}  {drawn}", flush=True)
        return {"version": peer.VERSION, "rows": rows}


def measure(with_peer: bool = True) -> dict[str, Any]:
    """Everything."""
    begun = time.perf_counter()
    figures = Figures()
    preparing(figures)
    with pages.chromium() as browser:
        with served() as address:
            for part in (page_of_512, real_models, page_of_1024):
                try:
                    part(figures, browser, address)
                except PlaywrightError as error:  # what is measured so far is kept
                    figures.leave_out(part.__name__, re.sub(r"\s+", " ", str(error))[:200])
        bertviz = beside(browser) if with_peer else {"reason": "not asked for"}
        chromium = browser.version
    return {
        "environment": environment() | {"chromium": chromium, "playwright": version("playwright")},
        "figures": [asdict(figure) for figure in figures.list],
        "left_out": figures.left_out,
        "bertviz": bertviz,
        "seconds": time.perf_counter() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where results go; none: they are only printed")
    parser.add_argument("--no-peer", action="store_true", help="without BertViz")
    arguments = parser.parse_args()
    measured = measure(with_peer=not arguments.no_peer)
    met = sum(figure["met"] for figure in measured["figures"])
    print(f"{met} of {len(measured['figures'])} goals met, in {measured['seconds']:.0f} s")
    if arguments.out is not None:
        write_text(arguments.out, json.dumps(measured, indent=1, ensure_ascii=False) + "\n")
        print(f"-> {arguments.out}")


if __name__ == "__main__":
    main()
