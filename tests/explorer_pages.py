"""The explorer's page in a real browser, for tests: a server of small models, Chromium, and what a hand does.

Driven by playwright in Debian's Chromium; every request beyond loopback is refused and counted.
"""

import math
import re
import shutil
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import explored
import regard as rg
from regard.explorer.catalog import Entry
from regard.explorer.guard import Place
from regard.explorer.server import Explorer, listen, serving
from regard.explorer.session import Session
from regard.explorer.subject import Pair, Text

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install -y chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
SENTENCE = "a b c d e f g a b"
MODELS = {
    "decoder": (lambda: explored.decoder(num_kv_heads=2), Text(SENTENCE)),
    "encoder": (lambda: explored.encoder(), Text(SENTENCE)),
    "argmax": (lambda: explored.encoder(mechanism=rg.Argmax()), Text(SENTENCE)),
    "pair": (lambda: explored.translator(), Pair("a b c d", "e f g h i")),
}
FITS = "document.documentElement.scrollHeight <= innerHeight && document.body.scrollWidth <= innerWidth"
HOSTILE = [
    "</script><script>window.broken = 1</script>", "<img src=x onerror='window.broken = 1'>", "\u202eright to left",
    "שלום", "😀", "", "${window.broken = 1}", "a\0b\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def explorer():
    """A server of small models with random weights, in a thread."""
    torch.manual_seed(0)
    session = Session({name: make() for name, (make, _) in MODELS.items()})
    entries = [
        Entry(name=name, title=name, kind="pair" if name == "pair" else "text", example=example)
        for name, (_, example) in MODELS.items()
    ]
    session.shown_models["davit"] = explored.davit()
    entries.append(Entry(name="davit", title="davit", kind="image", example=None))
    entries.append(Entry(name="translator", title="translator", kind="pair", example=Pair("Le chat dort.")))
    entries.append(Entry(name="absent", title="Absent", kind="text", installed=False, install="pip x", example=None))
    opened = listen("127.0.0.1", 0)
    running = Explorer(session, Place(host="127.0.0.1", port=opened.getsockname()[1]), lambda: entries)
    server = serving(running.app())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield running
    server.should_exit = True
    thread.join(10)
    running.close()
    opened.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@contextmanager
def window(browser, **options):
    """A page that may reach this machine only, and what went wrong in it."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
    tab = context.new_page()
    troubles = SimpleNamespace(list=[])

    def allow(route):
        local = re.match(r"(http://127\.0\.0\.1:|file:|data:|blob:|about:)", route.request.url)
        if not local:
            troubles.list.append(f"refused {route.request.url}")
        return route.continue_() if local else route.abort()

    def failed(request):
        # Chromium says "aborted" of answers that are read as a stream to their end, and of those no longer wanted.
        if "ERR_ABORTED" not in (request.failure or ""):
            troubles.list.append(f"failed {request.url}")

    context.route("**/*", allow)
    tab.on("console", lambda message: message.type in ("error", "warning") and troubles.list.append(message.text))
    tab.on("pageerror", lambda error: troubles.list.append(str(error)))
    tab.on("requestfailed", failed)
    tab.on("response", lambda answer: answer.status >= 400 and troubles.list.append(f"{answer.status} {answer.url}"))
    tab.troubles = troubles.list
    try:
        yield tab
    finally:
        context.close()


def settle(tab):
    """Wait until nothing is computed, fetched or drawn any more."""
    for _ in range(600):
        if tab.evaluate("Boolean(window.regard)"):
            break
        tab.wait_for_timeout(20)
    tab.evaluate("regard.settled()")


def visit(tab, explorer, **fields):
    address = "&".join(f"{name}={value}" for name, value in fields.items())
    tab.goto(f"http://127.0.0.1:{explorer.place.port}/" + (f"#{address}" if address else ""))
    settle(tab)


@pytest.fixture
def tab(browser, explorer):
    with window(browser) as opened:
        yield opened
        assert opened.troubles == []


def state(tab, name):
    return tab.evaluate(f"regard.state.{name}")


def shown(tab, explorer):
    """The run that the page shows, on the server."""
    return explorer.session.snapshot(tab.evaluate("regard.state.run.id"))


def shape(tab):
    return state(tab, "run.layers[regard.state.layer].rows"), state(tab, "run.layers[regard.state.layer].columns")


def values(tab):
    """All numbers of the chosen head as the page has them; masked pairs are NaN."""
    rows, columns = shape(tab)
    listed = tab.evaluate(
        f"Array.from({{length: {rows * columns}}}, (_, i) => regard.valueAt(Math.floor(i / {columns}), i % {columns}))"
    )
    return torch.tensor([math.nan if number == "masked" else number for number in listed]).view(rows, columns)


def middle(box):
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def cell(tab, row, column):
    return middle(tab.evaluate(f"regard.cellOnScreen({row}, {column})"))


def pixels(tab):
    """The colour in the middle of each cell of the matrix: of row and column, the red, green and blue."""
    rows, columns = shape(tab)
    places = [[*cell(tab, row, column)] for row in range(rows) for column in range(columns)]
    listed = tab.evaluate(
        """(places) => { const canvas = document.querySelector("[data-surface=matrix-0]").previousElementSibling;
        const box = canvas.getBoundingClientRect(), ratio = canvas.width / box.width;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return places.map(([x, y]) => { const at = 4 * (Math.round((y - box.top) * ratio) * canvas.width
          + Math.round((x - box.left) * ratio)); return [...data.slice(at, at + 3)]; }); }""",
        places,
    )
    # What Chromium advises a page that reads its canvas often; only this test does.
    tab.troubles[:] = [trouble for trouble in tab.troubles if "willReadFrequently" not in trouble]
    return {(i // columns, i % columns): tuple(colour) for i, colour in enumerate(listed)}


def drag(tab, place, release=False):
    """Move the dial as a hand does: many inputs, one change when it is let go."""
    tab.evaluate(
        """([place, release]) => { const dial = document.getElementById("beta");
        dial.value = place; dial.dispatchEvent(new Event("input", { bubbles: true }));
        if (release) dial.dispatchEvent(new Event("change", { bubbles: true })); }""",
        [place, release],
    )
    settle(tab)
