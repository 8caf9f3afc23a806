"""Statements: Markdown with formulas between dollar signs, as HTML and as the data that the PDF is made of."""

from functools import cache
from typing import Any

from regard.core.display import Html
from regard.core.extras import needed_for
from regard.lab.reporting.formula import mathml, typst

with needed_for("the lab's report", "lab"):
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.tree import SyntaxTreeNode

NODES = ("root", "inline", "paragraph", "bullet_list", "ordered_list", "list_item", "strong", "em", "softbreak")
"""What a statement may consist of, besides text, code and formulas."""


def html(text: str) -> Html:
    """Markdown as HTML.

    >>> html("**Not** <b>")
    '<p><strong>Not</strong> &lt;b&gt;</p>'
    """
    return Html(_markdown().render(text).strip())


def line(text: str) -> Html:
    """A line of Markdown as HTML without a paragraph around it."""
    return Html(_markdown().renderInline(text))


def nodes(text: str) -> list[dict[str, Any]]:
    """Markdown as a tree of JSON, its formulas in Typst; ValueError for what a statement may not have.

    >>> nodes("at $d$")[0]["inside"][0]["inside"]
    [{'kind': 'text', 'text': 'at '}, {'kind': 'formula', 'text': 'd'}]
    """
    return [_node(node) for node in SyntaxTreeNode(_markdown().parse(text)).children]


def _node(node: SyntaxTreeNode) -> dict[str, Any]:
    if node.type == "formula":
        return {"kind": "formula", "text": typst(node.content)}
    if node.type in ("text", "code_inline"):
        return {"kind": node.type, "text": node.content}
    if node.type not in NODES:
        raise ValueError(f"statement: expected paragraphs, lists, emphasis, code and formulas, got {node.type}")
    return {"kind": node.type, "inside": [_node(child) for child in node.children]}


@cache
def _markdown() -> MarkdownIt:
    markdown = MarkdownIt("commonmark", {"html": False})
    markdown.disable(["image", "link", "autolink", "html_inline", "html_block", "reference"])
    markdown.inline.ruler.before("escape", "formula", _read_formula)
    markdown.add_render_rule("formula", lambda self, tokens, index, options, env: mathml(tokens[index].content))
    return markdown


def _read_formula(state: StateInline, silent: bool) -> bool:
    """A formula from a dollar sign to the next."""
    end = state.src.find("$", state.pos + 1)
    if state.src[state.pos] != "$" or end <= state.pos + 1:
        return False
    if not silent:
        state.push("formula", "math", 0).content = state.src[state.pos + 1 : end]
    state.pos = end + 1
    return True
