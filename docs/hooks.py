"""Pages of the site that are files elsewhere in the repository, and links to files that are not on the site."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"design.md": "DESIGN.md", "benchmarks.md": "benchmarks/README.md", "changes.md": "CHANGELOG.md"}
"""Pages of the site, by the files of the repository that they are."""
LINK = re.compile(r"(?<!!)\[([^]]+)]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    root = Path(config.config_file_path).parent
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between the repository's files lead to their pages; those to files without a page become words."""
    home = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    shown = {source: name for name, source in PAGES.items()}
    shown |= {f"docs/{file.src_uri}": file.src_uri for file in files if file.inclusion.is_included()}

    def turned(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        if path in shown:
            here = posixpath.dirname(page.file.src_uri)
            return f"[{words}]({posixpath.relpath(shown[path], here or '.')}{anchor})"
        return words if (Path(config.config_file_path).parent / path).exists() else link[0]

    return LINK.sub(turned, markdown)
