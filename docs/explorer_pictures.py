"""The explorer's pictures in docs/explorer/: screenshots of its page in Chromium, from real weights.

    python docs/explorer_pictures.py [NAME …]

Needs Chromium (`apt-get install -y chromium`), `pip install playwright pillow`, and the weights of MiniLM and SmolLM2
(`regard models`); what is missing is said, and its pictures stay as they are. The Vision Transformer is trained on
rendered letters for two minutes, or taken from the folder that --vision names.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import regard as rg
from regard.checkpoints.names import NAMES
from regard.core.files import write

FOLDER = Path(__file__).parent / "explorer"
SIZE = {"width": 1400, "height": 900}
MOST_BYTES = 150_000
FREQUENT = 24
"""Colours that a picture keeps exactly."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FRENCH = "La petite voiture rouge est très rapide."
TIRED = "The animal didn't cross the street because it was too tired."
STORE = "When Mary and John went to the store, John gave a drink to"
LONG = """The old lighthouse stood on the last rock of the coast, where the wind never stopped. Every evening the keeper
climbed its hundred and twelve steps, lit the lamp and wrote the weather into a book. Ships that came from the north
looked for its light, because the water between the islands was shallow and the charts were older than the sailors. One
night in November the lamp went out. The keeper searched for oil, but the last barrel was empty, and the boat from the
village could not cross the bay before the storm was over. So he carried his books, his table and finally his bed up
the stairs and burned them one after the other, until the morning came and the captain of a small ship, who had seen a
strange red light all night long, knocked at the door to say thank you."""


class Stage:
    """A page of the explorer, and what a visitor does with it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address

    def open(self, **fields: Any) -> None:
        """Go to a deep link."""
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{urlencode(texts)}")
        self.page.wait_for_function("() => window.regard")
        self.settle()

    def settle(self) -> None:
        """Wait until nothing is computed or drawn any more."""
        self.page.evaluate("regard.settled()")
        self.page.wait_for_timeout(150)

    def click(self, selector: str) -> None:
        """Click, and wait for what comes of it."""
        self.page.click(selector)
        self.settle()

    def hover(self, row: int, column: int, pane: int = 0) -> None:
        """Point at a cell of the matrix."""
        box = self.page.evaluate(f"regard.cellOnScreen({row}, {column}, {pane})")
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.settle()

    def drag_beta(self, share: float) -> None:
        """Drag the dial to a share of its way, and let go."""
        box = self.page.locator("#beta").bounding_box()
        middle = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + box["width"] / 2, middle)
        self.page.mouse.down()
        self.page.wait_for_timeout(300)
        for turn in range(1, 6):
            self.page.mouse.move(box["x"] + (0.5 + (share - 0.5) * turn / 5) * box["width"], middle)
            self.page.wait_for_timeout(60)
        self.page.mouse.up()
        self.settle()


def alignment(stage: Stage) -> None:
    """The translator's alignment, in the last layer's cross-attention."""
    stage.open(model="translator", source=FRENCH, layer=5, head=3)


def dial(stage: Stage) -> None:
    """The alignment with the beta dial moved, beside that before."""
    alignment(stage)
    stage.click("[data-scope=layer]")
    stage.drag_beta(0.2)
    stage.click("#before")
    stage.page.mouse.move(5, 895)


def mechanism(name: str, layer: int, head: int) -> Callable[[Stage], None]:
    """A layer of MiniLM with another mechanism than softmax, side by side."""

    def show(stage: Stage) -> None:
        stage.open(model="minilm", text=TIRED, layer=layer, head=head)
        stage.click("[data-scope=layer]")
        stage.page.select_option("#mechanism", name)
        stage.settle()

    return show


def effects(stage: Stage) -> None:
    """Every head of MiniLM silenced once, beside its random twin; the strongest is chosen."""
    stage.open(model="minilm", text=TIRED)
    stage.click("#effects")
    stage.click("#twin-effects")
    strongest = "[...regard.state.run.effects.values()].reduce((a, b) => (b.distance > a.distance ? b : a))"
    place = stage.page.evaluate(f"(({{ layer, head }}) => regard.headOnScreen(layer, head))({strongest})")
    stage.page.mouse.click(place["x"], place["y"])
    stage.settle()
    stage.page.mouse.move(5, 895)
    stage.settle()


def generation(stage: Stage) -> None:
    """Steps of SmolLM2 with their alternatives, in a head that looks back at the name."""
    stage.open(model="smollm2", text=STORE, layer=24, head=4)
    stage.click("#generate")


def long_text(stage: Stage) -> None:
    """MiniLM on a long text."""
    stage.open(model="minilm", text=" ".join(LONG.split()), layer=1, head=2, view="matrix", threshold=0.01)


def vision(stage: Stage) -> None:
    """A Vision Transformer on a letter: what the class token attends to."""
    stage.open(model="vision", image="letter R", layer=2, head=1, lock={"rows": [0], "columns": []})


def why(stage: Stage) -> None:
    """Why a token of SmolLM2 attends to another, in dark colours."""
    stage.open(model="smollm2", text=STORE, layer=24, head=4)
    stage.hover(13, 1)


PICTURES: dict[str, Callable[[Stage], None]] = {
    "alignment.png": alignment,
    "dial.png": dial,
    "quadratic.png": mechanism("quadratic", 1, 8),
    "elu.png": mechanism("elu", 1, 8),
    "window.png": mechanism("window", 2, 1),
    "effects.png": effects,
    "generation.png": generation,
    "long.png": long_text,
    "vision.png": vision,
    "dark.png": why,
}
"""The pictures of docs/explorer/, and what leads to them. dark.png is in dark colours."""
NEEDS = {"quadratic.png": "minilm", "elu.png": "minilm", "window.png": "minilm", "effects.png": "minilm",
         "long.png": "minilm", "generation.png": "smollm2", "dark.png": "smollm2"}  # fmt: skip
"""The weights that a picture needs, besides those that ship."""


def missing() -> str | None:
    """What no picture can be taken without, in words."""
    if shutil.which("chromium") is None:
        return "apt-get install -y chromium"
    packages = {"playwright": "playwright", "PIL": "pillow", "starlette": "starlette", "uvicorn": "uvicorn"}
    absent = [package for module, package in packages.items() if find_spec(module) is None]
    return f"pip install {' '.join(absent)}" if absent else None


def trained_vision() -> rg.VisionTransformer:
    """A small Vision Transformer, trained on rendered letters."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "vision"
        command = [sys.executable, "-m", "regard", "train", "vision", "--steps", "1500", "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return rg.load(out)


@contextmanager
def served(vision_model: rg.VisionTransformer | None) -> Iterator[str]:
    """The address of an explorer with the models of the catalog and a Vision Transformer."""
    from regard.explorer.catalog import Entry, catalog
    from regard.explorer.guard import Place
    from regard.explorer.server import Explorer, listen, serving
    from regard.explorer.session import Session

    entries = [entry for entry in catalog() if entry.kind != "image"]
    if vision_model is not None:
        title = "Vision Transformer"
        entries.append(Entry(name="vision", title=title, kind="image", example=None))
    with listen("127.0.0.1", 0) as opened:
        place = Place(host="127.0.0.1", port=opened.getsockname()[1])
        session = Session({} if vision_model is None else {"vision": vision_model})
        explorer = Explorer(session, place, lambda: entries)
        server = serving(explorer.app())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{place.port}/"
        finally:
            server.should_exit = True
            thread.join(10)
            explorer.close()


def reduced(content: bytes) -> bytes:
    """A PNG with a palette: as many colours as its room allows, the most frequent of them unchanged."""
    import numpy as np
    from PIL import Image

    picture = Image.open(io.BytesIO(content)).convert("RGB")
    pixels = np.asarray(picture).reshape(-1, 3)
    shades, places, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(-counts)
    vivid = order[np.ptp(shades[order].astype(np.int32), axis=1) > 90]  # controls and labels: few pixels, but seen
    frequent = shades[[*order[: FREQUENT // 2], *vivid[: FREQUENT // 2]]]
    for colours in (256, 192, 128, 96, 64, 48):
        mixed = picture.quantize(colours - FREQUENT, dither=Image.Dither.NONE).getpalette()
        palette = np.concatenate([frequent, np.array(mixed, dtype=np.uint8).reshape(-1, 3)])[:colours]
        away = ((shades[:, None].astype(np.int32) - palette[None].astype(np.int32)) ** 2).sum(-1)
        numbers = away.argmin(1).astype(np.uint8)[places.reshape(-1)]
        few = Image.frombytes("P", picture.size, numbers.tobytes())
        few.putpalette(palette.tobytes())
        file = io.BytesIO()
        few.save(file, "PNG", optimize=True)
        if file.tell() <= MOST_BYTES:
            break
    return file.getvalue()


def draw(names: list[str], vision_folder: Path | None = None) -> None:
    """Take the pictures that are named, as far as their models are installed."""
    from playwright.sync_api import sync_playwright

    for name in list(names):
        package = NAMES.get(NEEDS.get(name, ""))
        if package is not None and package.find() is None:
            print(f"docs/explorer/{name} is left: {package.command}")
            names.remove(name)
    model = None
    if "vision.png" in names:
        model = rg.load(vision_folder) if vision_folder else trained_vision()
    FOLDER.mkdir(exist_ok=True)
    with served(model) as address, sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name in names:
            scheme = "dark" if name.startswith("dark") else "light"
            context = browser.new_context(viewport=SIZE, color_scheme=scheme)
            page = context.new_page()
            page.set_default_timeout(300_000)
            PICTURES[name](Stage(page, address))
            content = reduced(page.screenshot())
            write(FOLDER / name, lambda beside: beside.write_bytes(content))  # noqa: B023 (called at once)
            print(f"-> docs/explorer/{name}, {len(content) / 1e3:.0f} kB", flush=True)
            context.close()
        browser.close()


def main() -> None:
    """Take the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; all if none is given")
    parser.add_argument(
        "--vision", type=Path, metavar="FOLDER", help="a trained Vision Transformer; default: train one"
    )
    arguments = parser.parse_args()
    absent = missing()
    if absent is not None:
        print(f"docs/explorer stays as it is: {absent}")
        return
    draw(arguments.names or list(PICTURES), arguments.vision)


if __name__ == "__main__":
    main()
