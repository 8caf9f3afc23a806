"""BertViz's model view of the same weights: the size of its page, and when it has drawn.

Its Python package comes from PyPI and the scripts that its page takes from a CDN from npm, both into a temporary
folder; Chromium gets them from there. `python peer.py FOLDER TOKENS FILE` writes one page in a process of its own.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "1.4.1"
SCRIPTS = {
    "require.min.js": ("requirejs@2.3.6", "package/require.js"),
    "d3.min.js": ("d3@5.7.0", "package/dist/d3.min.js"),
    "jquery.min.js": ("jquery@2.2.4", "package/dist/jquery.min.js"),
}
"""What the page asks its CDN for: the packages of npm that have it, and where."""
MOST_MEMORY = 12 * 2**30
WRITING = 90
DRAWING = {128: 90, 512: 40}
"""Seconds that a page may take, by its tokens; at 512 the browser gives up sooner or later, whatever the limit."""


def fetch(folder: Path) -> None:
    """BertViz and its scripts, to a folder. Raises CalledProcessError or OSError where they cannot be had."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "python")]
    subprocess.run([*pip, f"bertviz=={VERSION}"], check=True, capture_output=True, timeout=60)
    for name, (package, path) in SCRIPTS.items():
        command = ["npm", "pack", "--silent", package]
        packed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, timeout=60)
        archive = packed.stdout.strip().split("\n")[-1]
        content = subprocess.run(["tar", "-xzOf", archive, path], check=True, capture_output=True, cwd=folder)
        (folder / name).write_bytes(content.stdout)


def write(folder: Path, tokens: int, file: Path) -> None:
    """The page, with at most so much memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    from subjects import text, weights

    display = ModuleType("IPython.display")  # BertViz needs of IPython what wraps a text
    display.HTML = display.Javascript = lambda data: SimpleNamespace(data=data)  # type: ignore[attr-defined]
    display.display = print  # type: ignore[attr-defined]
    sys.modules |= {"IPython": ModuleType("IPython"), "IPython.display": display}
    sys.path.append(str(folder / "python"))
    from bertviz import model_view

    attention = weights(tokens)
    begun = time.perf_counter()
    page = model_view(attention, text(tokens).split(), html_action="return").data
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{page}</body>")
    print(json.dumps({"seconds": time.perf_counter() - begun}))


DRAWN = """
addEventListener("DOMContentLoaded", () => {
  const look = () => {
    if (document.querySelector("svg line")) requestAnimationFrame(() => { window.drawn = performance.now(); });
    else setTimeout(look, 50);
  };
  look();
});
"""


def measure(browser: Any, folder: Path, tokens: int) -> dict[str, Any]:
    """Write and open a page."""
    from browser import tab
    from playwright.sync_api import Error

    file = folder / f"page{tokens}.html"
    command = [sys.executable, __file__, str(folder), str(tokens), str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WRITING, check=True)
    except subprocess.TimeoutExpired:
        return {"tokens": tokens, "reason": f"not written in {WRITING} s"}
    except subprocess.CalledProcessError as error:
        return {"tokens": tokens, "reason": f"not written: {error.stderr.strip().split(chr(10))[-1]:.200}"}
    result: dict[str, Any] = {"tokens": tokens, "bytes": file.stat().st_size, **json.loads(done.stdout)}

    def vendored(route: Any) -> bool:
        name = route.request.url.split("/")[-1]
        if name not in SCRIPTS:
            return False
        route.fulfill(path=str(folder / name), content_type="text/javascript")
        return True

    limit = DRAWING[tokens]
    try:
        with tab(browser, vendored, DRAWN) as page:
            begun = time.perf_counter()
            page.goto(file.as_uri(), timeout=1e3 * limit, wait_until="commit")
            left = limit - (time.perf_counter() - begun)
            page.wait_for_function("() => window.drawn", timeout=1e3 * left, polling=200)
            result["first_draw_seconds"] = page.evaluate("drawn") / 1e3
            result["elements"] = page.evaluate("document.querySelectorAll('*').length")
    except Error as error:
        crashed = "crash" in str(error).lower()
        result["reason"] = "the tab crashed" if crashed else f"nothing drawn in {limit} s"
    file.unlink()
    return result


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
