"""What the page does in Chromium, timed inside of it: from an event to the frame after its paint."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, Page, Route, sync_playwright

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
PROBE = (Path(__file__).parent / "page.js").read_text()
UNPACKED = """[...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter(({ name }) => !name.includes("/api/")).reduce((size, entry) => size + entry.decodedBodySize, 0)"""
LOCAL = re.compile(r"(http://127\.0\.0\.1:|file:|data:|blob:|about:)")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium."""
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("chromium is not installed: apt-get install -y chromium")
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def tab(browser: Browser, answer: Callable[[Route], bool] = lambda route: False, probe: str = PROBE) -> Iterator[Page]:
    """A page of 1400 × 900 that reaches this machine alone; `answer` may serve other addresses."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})

    def allow(route: Route) -> None:
        if LOCAL.match(route.request.url):
            route.continue_()
        elif not answer(route):
            route.abort()

    if probe is not PROBE:  # routing slows every request down: only where scripts come from elsewhere
        context.route("**/*", allow)
    context.add_init_script(probe)
    try:
        page = context.new_page()
        page.set_default_timeout(120_000)
        yield page
    finally:
        context.close()


class Traffic:
    """How many bytes a page has received, and when."""

    def __init__(self, page: Page) -> None:
        self.session = page.context.new_cdp_session(page)
        self.session.send("Network.enable")
        self.addresses: dict[str, str] = {}
        self.offset: float | None = None
        self.parts: list[tuple[float, str, float]] = []
        self.session.on("Network.requestWillBeSent", self._sent)
        self.session.on("Network.dataReceived", self._received)
        self.session.on("Network.loadingFinished", self._finished)

    def _sent(self, event: dict[str, Any]) -> None:
        self.addresses[event["requestId"]] = event["request"]["url"]
        if self.offset is None:
            self.offset = event["wallTime"] - event["timestamp"]

    def _is_answer(self, event: dict[str, Any]) -> bool:
        return "/api/" in self.addresses.get(event["requestId"], "")

    def _received(self, event: dict[str, Any]) -> None:
        if self._is_answer(event):
            self.parts.append((event["timestamp"], "answers", event["dataLength"]))

    def _finished(self, event: dict[str, Any]) -> None:
        if not self._is_answer(event):
            self.parts.append((event["timestamp"], "page", event["encodedDataLength"]))

    def bytes_until(self, wall_seconds: float) -> int:
        """Of everything before a moment."""
        assert self.offset is not None
        return round(sum(size for at, _, size in self.parts if at + self.offset <= wall_seconds))

    def page_bytes(self) -> int:
        """Of the page itself: HTML, styles, scripts."""
        return round(sum(size for _, kind, size in self.parts if kind == "page"))


def link(address: str, **fields: str) -> str:
    """The page's address with a model and a text."""
    return f"{address}#" + "&".join(f"{name}={quote(value)}" for name, value in fields.items())


def settle(page: Page) -> None:
    """Wait until nothing is computed, fetched or drawn any more."""
    page.wait_for_function("() => window.regard")
    page.evaluate("regard.settled()")


def opened(page: Page, address: str) -> dict[str, float]:
    """Open an address. Seconds until the first thumbnails and until the chosen head's exact weights are on the screen,
    without those between the page's request and the server's first frame, in which the model runs. Layers come one by
    one; `after_last_layer` is what comes after the last thumbnails, and `whole` is when every head has its entropy."""
    traffic = Traffic(page)
    page.goto(address)
    page.wait_for_function("() => window.probe?.times.whole", polling=100)
    times = page.evaluate("probe.times")
    settle(page)
    computing = times["answered"] - times["asked"]
    return {
        "first": (times["first"] - computing) / 1e3,
        "all": (times["all"] - computing) / 1e3,
        "whole": (times["whole"] - computing) / 1e3,
        "after_last_layer": (times["all"] - times["last"]) / 1e3,
        "computing": computing / 1e3,
        "bytes_before_first": traffic.bytes_until((times["origin"] + times["first"]) / 1e3),
        "bytes_before_all": traffic.bytes_until((times["origin"] + times["all"]) / 1e3),
        "page_bytes": traffic.page_bytes(),
        "page_bytes_unpacked": page.evaluate(UNPACKED),
    }


def summary(milliseconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    return {
        "median": median(milliseconds),
        "p95": quantiles(milliseconds, n=20, method="inclusive")[-1],
        "samples": len(milliseconds),
    }


def hovering(page: Page, tokens: int, samples: int = 60) -> dict[str, float]:
    """The pointer over cells of the matrix."""
    places = [((37 * turn) % tokens, (101 * turn) % tokens) for turn in range(samples + 5)]
    boxes = page.evaluate("places => places.map(([row, column]) => regard.cellOnScreen(row, column))", places)
    page.evaluate("window.watched = probe.follow('pointermove')")
    for box in boxes:
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(60)
    page.evaluate("watched.stop()")
    return summary(page.evaluate("watched.list")[5:])


def choosing(page: Page, samples: int = 40) -> dict[str, float]:
    """Clicks on other heads, until their exact weights are drawn."""
    times = []
    for turn in range(1, samples + 3):
        layer, head = (5 * turn) % 12, (7 * turn + turn // 12) % 12
        reached = (
            f"() => regard.state.layer === {layer} && regard.state.head === {head} && regard.valueAt(0, 0) !== null"
        )
        place = page.evaluate(f"regard.headOnScreen({layer}, {head})")
        page.evaluate(f"window.clicked = probe.afterClick({reached}), 0")
        page.mouse.click(place["x"], place["y"])
        times.append(page.evaluate("clicked"))
        settle(page)
    return summary(times[2:])


def dragging(page: Page, samples: int = 60) -> dict[str, float]:
    """The beta dial, dragged from one end towards the other."""
    box = page.locator("#beta").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.down()
    page.wait_for_timeout(1000)  # the products of queries and keys come
    page.evaluate("window.watched = probe.follow('input')")
    for turn in range(samples + 5):
        share = 0.5 + 0.42 * ((turn * 7) % 41 / 20 - 1)
        page.mouse.move(box["x"] + share * box["width"], middle)
        page.wait_for_timeout(60)
    page.evaluate("watched.stop()")
    times = page.evaluate("watched.list")
    page.mouse.up()
    settle(page)
    return summary(times[5:])


def burden(page: Page) -> dict[str, int]:
    """Nodes of the document, and bytes of JavaScript: objects and array buffers, after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")
    return {
        "elements": page.evaluate("document.querySelectorAll('*').length"),
        "nodes": page.evaluate(
            "(() => { const walk = document.createTreeWalker(document); let count = 1;"
            " while (walk.nextNode()) count++; return count; })()"
        ),
        "heap_bytes": round(heap["usedSize"] + heap.get("backingStorageSize", 0)),
    }


def intervening(page: Page, samples: int = 12) -> dict[str, float]:
    """Clicks on "silence", until the changed output is drawn; each is taken back before the next."""
    times = []
    for _ in range(samples + 2):
        page.evaluate(
            "window.clicked = probe.afterClick(() => regard.state.run !== regard.state.base && !regard.state.busy), 0"
        )
        page.click("[data-change=silence]")
        times.append(page.evaluate("clicked"))
        settle(page)
        page.click("[data-change=silence]")
        settle(page)
    return summary(times[2:])


def silencing(page: Page) -> dict[str, Any]:
    """Every head silenced once."""
    page.evaluate("window.clicked = probe.afterClick(() => regard.state.run.effects && !regard.state.busy), 0")
    page.click("#effects")
    bar = page.evaluate(
        "async () => { while (!regard.state.run.effects) { if (document.getElementById('progress')) return true;"
        " await probe.frame(); } return false; }"
    )
    seconds = page.evaluate("clicked") / 1e3
    return {"seconds": seconds, "heads": page.evaluate("regard.state.run.effects.size"), "bar": bar}


def cancelling(page: Page) -> float:
    """Seconds until the page answers again after all heads' silencing is cancelled."""
    page.click("#effects")
    page.wait_for_selector("#cancel")
    page.wait_for_function("() => regard.state.progress?.done > 0", polling=20)
    page.evaluate("window.clicked = probe.afterClick(() => !regard.state.busy), 0")
    page.click("#cancel")
    page.evaluate("clicked")
    page.evaluate("window.clicked = probe.afterClick(() => regard.state.run !== regard.state.base), 0")
    page.click("[data-change=silence]")
    seconds = page.evaluate("clicked") / 1e3
    settle(page)
    page.click("#clear")
    settle(page)
    return seconds
