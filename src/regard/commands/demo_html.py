"""The page of `regard demo`: one HTML file next to its figures, without scripts or external resources."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.core.display import escape

if TYPE_CHECKING:
    from regard.commands.demo_page import Picture, Step

ATTENTION = (
    "A model that writes a word has to decide which other words matter for it. Attention decides it by numbers: the "
    "word asks with a query, every other word answers with a key, and the better the two agree, the more of that "
    "word's value is taken. These shares are the attention weights; a row of them sums to 1, and the picture above "
    "shows one row for every English word."
)
"""What attention is, in three sentences."""
STYLE = """
:root { --ink: #1f2933; --quiet: #5b6773; --rule: #d5dbe1; --page: #f6f7f9; --card: #ffffff; --mark: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --quiet: #a3aeb9; --rule: #3a434d; --page: #14181c; --card: #1d2329; --mark: #56b4e9; }
}
* { box-sizing: border-box; }
body { font: 16px/1.6 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .5rem; }
h2 span { color: var(--mark); }
p, li { max-width: 44rem; }
p { margin: .5rem 0 1rem; }
.quiet { color: var(--quiet); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 6px; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .8rem; border-bottom: 1px solid var(--rule); }
th { color: var(--quiet); font-weight: 600; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
figure { background: #fff; border: 1px solid var(--rule); border-radius: 6px; margin: 1rem 0; padding: 1rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { color: #5b6773; font-size: .9rem; margin-top: .75rem; }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; margin: 1rem 0; }
summary { cursor: pointer; padding: .6rem .8rem; font-weight: 600; }
details .wide { border: 0; border-top: 1px solid var(--rule); border-radius: 0; margin: 0; }
code { font: .9em ui-monospace, monospace; background: var(--card); border: 1px solid var(--rule); border-radius: 4px;
       padding: .05em .35em; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  main { padding: 1.25rem .8rem 3rem; }
  h1 { font-size: 1.5rem; }
  figure { padding: .4rem; }
  th, td { padding: .3rem .5rem; }
  th { white-space: normal; }
}
"""
NEXT = (
    (
        "Translate a sentence of your own with the translator that ships",
        'regard translate "La voiture rouge est rapide."',
    ),
    ("Swap the attention: train with another mechanism", "regard train translate --mechanism elu --out run"),
    ("Check a mechanism of your own against every law", "regard check --own my_file.py:MyMechanism"),
    ("Count what attention costs at your lengths and heads", "regard cost --length 8192 --heads 32 --kv-heads 8"),
    ("Look inside any of these models in Python", 'with rg.trace(rg.load("demo/softmax")) as trace: …'),
)
"""Next steps: a purpose and a command."""


def page(steps: "Sequence[Step]", opening: "Picture", folder: str) -> str:
    """The steps as one page that begins with the figure `opening`; `folder` has the runs.

    >>> from regard.commands.demo_page import Picture, Step
    >>> "<h2><span>1</span> Train</h2>" in page([Step(title="Train", words="…")], Picture("a.png", None, "a"), "demo")
    True
    """
    sections = "\n".join(_section(number, step) for number, step in enumerate(steps, start=1))
    following = "\n".join(
        f"<li>{escape(purpose)}:<br><code>{escape(command.replace('demo/', f'{folder}/'))}</code></li>"
        for purpose, command in NEXT
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Regard: where a word looks</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        "<h1>Where a word looks while it is written</h1>\n"
        f"{_figure(opening)}\n<p>{escape(ATTENTION)}</p>\n"
        '<p class="quiet">Everything on this page was computed by <code>regard demo</code> on this machine: two small '
        "translators, alike but for their attention, trained, compared, counted and checked.</p>\n"
        f"{sections}\n<h2>Where to go next</h2>\n<ul>\n{following}\n</ul>\n"
        '<p class="quiet">README.md has the ten lines of Python and the table of mechanisms, DESIGN.md the contracts, '
        "examples/your_own_mechanism.py a mechanism in one class.</p>\n"
        "</main>\n</body>\n</html>\n"
    )


def _section(number: int, step: "Step") -> str:
    parts = [f"<h2><span>{number}</span> {escape(step.title)}</h2>", f"<p>{escape(step.words)}</p>"]
    parts += [f"<p>{escape(note)}</p>" for note in step.notes]
    if step.rows:
        grid = _table(step)
        parts.append(f"<details><summary>{escape(step.folded)}</summary>{grid}</details>" if step.folded else grid)
    return "\n".join([*parts, *map(_figure, step.pictures)])


def _table(step: "Step") -> str:
    def cells(tag: str, texts: "Sequence[str]") -> str:
        return "".join(
            f'<{tag} class="number">{escape(text)}</{tag}>' if name in step.right else f"<{tag}>{escape(text)}</{tag}>"
            for name, text in zip(step.rows[0], texts, strict=True)
        )

    head = cells("th", list(step.rows[0]))
    body = "\n".join(f"<tr>{cells('td', list(row.values()))}</tr>" for row in step.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _figure(picture: "Picture") -> str:
    caption = escape(picture.caption)
    return f'<figure><img src="{escape(picture.name)}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
