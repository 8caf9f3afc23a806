"""The page as one file: its style sheets and modules, inline.

A browser refuses to import modules from a file on disk. Each module becomes a function, called once in the order of the
imports, whose result are its exports:

    const module_2 = (() => { const { state } = module_1; …; return { draw, get shown() { return shown; } }; })();

The modules of the page keep to few forms: imports stand on one line, exports before a declaration or as a list.
"""

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable
from functools import lru_cache
from html import escape
from pathlib import Path

PAGE = Path(__file__).with_name("page")
ENTRY = "main.js"
_IMPORT = re.compile(
    r"^import\s*(?:(?P<names>\{[^}]*\})|\*\s*as\s+(?P<whole>\w+))\s*"
    r"""from\s*["']\./(?P<path>[^"']+)["'];?[ \t]*$""",
    re.M,
)
_BARE_IMPORT = re.compile(r"""^import\s*["']\./(?P<path>[^"']+)["'];?[ \t]*$""", re.M)
_DECLARED = re.compile(r"^export\s+(?=(?:async\s+)?(?:function\*?|class|const|let)\s+(?P<name>[\w$]+))", re.M)
_LISTED = re.compile(r"export\s*\{(?P<names>[^}]*)\}\s*;?")
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.M)
_STYLE = re.compile(r'<link rel="stylesheet" href="page/([^"]+)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="page/([^"]+)"></script>')


def one_page(data: bytes, title: str) -> str:
    """The page as one HTML file that shows `data`, frames compressed with gzip."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    styles = "\n".join(_file(path) for path in _STYLE.findall(page))
    script = one_module()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(styles)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
    stored = f'<script type="application/octet-stream" id="data">{b64encode(data).decode()}</script>\n'
    page = _STYLE.sub("", page)
    page = page.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}', 1)
    page = re.sub(r"<title>[^<]*</title>", lambda _: f"<title>{escape(title)}</title>", page, count=1)
    page = page.replace("</head>", f"<style>{styles}</style>\n</head>", 1)
    return _SCRIPT.sub(lambda _: f'{stored}<script type="module">{script}</script>', page, count=1)


def _digest(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _file(path: str) -> str:
    return (PAGE / path).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _joined(stamp: tuple[tuple[str, int], ...]) -> str:
    names: dict[str, str] = {}
    parts: list[str] = []

    def add(path: str, importers: tuple[str, ...]) -> str:
        if path in importers:
            raise ValueError(f"page: expected modules that do not import each other, got {' → '.join(importers)}")
        if path not in names:
            text, exports = converted(_file(path), lambda inner: add(_inside(path, inner), (*importers, path)))
            names[path] = f"module_{len(names)}"
            parts.append(f"const {names[path]} = (() => {{\n{text}\nreturn {{ {', '.join(exports)} }};\n}})();")
        return names[path]

    add(ENTRY, ())
    # What would end the script element early, or begin a comment in it.
    return "\n".join(parts).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def one_module() -> str:
    """All modules of the page, joined in the order in which they run."""
    files = sorted(PAGE.rglob("*.js"))
    return _joined(tuple((str(file), file.stat().st_mtime_ns) for file in files))


def _inside(path: str, inner: str) -> str:
    return str((Path(path).parent / inner).as_posix()).removeprefix("./")


def converted(text: str, name_of: Callable[[str], str]) -> tuple[str, list[str]]:
    """A module's text as the body of a function, and the entries of the object it returns.

    >>> converted('import { a, b as c } from "./x.js";\\nexport const d = a + c;', lambda path: "module_0")
    ('const { a, b: c } = module_0;\\nconst d = a + c;', ['get d() { return d; }'])
    """
    exports: list[str] = []

    def taken(match: re.Match[str]) -> str:
        module = name_of(match["path"])
        if match["whole"]:
            return f"const {match['whole']} = {module};"
        return f"const {match['names'].replace(' as ', ': ')} = {module};"

    def declared(match: re.Match[str]) -> str:
        exports.append(_getter(match["name"], match["name"]))
        return ""

    def listed(match: re.Match[str]) -> str:
        for entry in match["names"].split(","):
            name, _, outside = (part.strip() for part in entry.partition(" as "))
            if name:
                exports.append(_getter(outside or name, name))
        return ""

    text = _BARE_IMPORT.sub(lambda match: f"{name_of(match['path'])};", _IMPORT.sub(taken, _SOURCE_MAP.sub("", text)))
    text = _LISTED.sub(listed, _DECLARED.sub(declared, text))
    if left := re.search(r"^(import\b(?!\()|export\b).*", text, re.M):
        raise ValueError(f"page: expected imports and exports of a simple form, got {left[0]:.80}")
    return text, exports


def _getter(outside: str, name: str) -> str:
    return f"get {outside}() {{ return {name}; }}"
