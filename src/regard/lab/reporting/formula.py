"""Formulas: the LaTeX that experiments use, as MathML and as Typst.

A command outside of this subset is an error, never left out or shown as it was typed.
"""

import re
from collections.abc import Iterator

_NAMED = """
alpha α  beta β  gamma γ  delta δ  epsilon ϵ  zeta ζ  eta η  theta θ  iota ι  kappa κ  lambda λ  mu μ  nu ν
xi ξ  pi π  rho ρ  sigma σ  tau τ  upsilon υ  phi ϕ  chi χ  psi ψ  omega ω  varepsilon ε  vartheta ϑ  varphi φ
varrho ϱ  ell ℓ  hbar ℏ  Gamma Γ  Delta Δ  Theta Θ  Lambda Λ  Xi Ξ  Pi Π  Sigma Σ  Phi Φ  Psi Ψ  Omega Ω  cdot ⋅
times ×  div ÷  pm ±  mp ∓  ast ∗  circ ∘  odot ⊙  otimes ⊗  oplus ⊕  le ≤  leq ≤  ge ≥  geq ≥  ne ≠  neq ≠
approx ≈  equiv ≡  sim ∼  simeq ≃  propto ∝  ll ≪  gg ≫  in ∈  notin ∉  subset ⊂  subseteq ⊆  supset ⊃  cup ∪
cap ∩  setminus ∖  emptyset ∅  to →  rightarrow →  leftarrow ←  leftrightarrow ↔  mapsto ↦  gets ←  Rightarrow ⇒
Leftarrow ⇐  Leftrightarrow ⇔  implies ⟹  iff ⟺  Longrightarrow ⟹  Longleftarrow ⟸  Longleftrightarrow ⟺
longrightarrow ⟶  longleftarrow ⟵  uparrow ↑  downarrow ↓  forall ∀  exists ∃  neg ¬  land ∧
lor ∨  perp ⟂  parallel ∥
mid ∣  infty ∞  partial ∂  nabla ∇  top ⊤  prime ′  dots …  ldots …  cdots ⋯  vdots ⋮  ddots ⋱  sum ∑  prod ∏
int ∫  bigcup ⋃  bigcap ⋂  bigoplus ⨁  Vert ‖  vert |  lfloor ⌊  rfloor ⌋  lceil ⌈  rceil ⌉  langle ⟨  rangle ⟩
"""
SYMBOLS = dict(pair.split() for pair in re.split(r"\n|  ", _NAMED.strip()))
"""Characters by their names in LaTeX."""
FENCES = {
    "lVert": 'class("opening", ‖)',
    "rVert": 'class("closing", ‖)',
    "lvert": 'class("opening", |)',
    "rvert": 'class("closing", |)',
}
FUNCTIONS = set(re.findall(r"\w+", "log ln exp sin cos tan tanh det dim ker Pr max min lim sup inf arg gcd"))
LIMITS = set(re.findall(r"\w+", "det Pr max min lim sup inf gcd"))
"""Functions with what they range over below them."""
SPACES = {",": "thin", ":": "med", ";": "thick", " ": "space", "quad": "quad", "qquad": "wide", "!": "#h(-0.1667em)"}
LETTERS = {
    "mathbf": "bold(upright({}))",
    "boldsymbol": "bold({})",
    "mathbb": "bb({})",
    "mathcal": "cal({})",
    "mathit": "italic({})",
    "mathsf": "sans({})",
}
ACCENTS = {
    "hat": "hat({})",
    "widehat": "hat({})",
    "bar": "macron({})",
    "overline": "overline({})",
    "underline": "underline({})",
    "tilde": "tilde({})",
    "vec": "arrow({})",
    "dot": "dot({})",
    "ddot": "dot.double({})",
    "sqrt": "sqrt({})",
    "underbrace": "limits(underbrace({}))",
    "overbrace": "limits(overbrace({}))",
}
SIZES = {f"{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r")}
"""LaTeX's commands for large brackets, which Typst keeps at the size of a letter."""
TEXTS = ("text", "textrm", "mathrm", "operatorname", "texttt")
ESCAPED = dict.fromkeys("{}%$&#_", "") | {"|": "‖"}
MATRICES = {"matrix": "#none", "pmatrix": '"("', "bmatrix": '"["', "vmatrix": '"|"', "Vmatrix": '"‖"'}
_TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|\s+|.", re.DOTALL)


def mathml(latex: str, *, display: bool = False) -> str:
    """A formula as a <math> element.

    >>> mathml(r"\\sqrt{d}")[:5], mathml(r"\\sqrt{d}")[-7:]
    ('<math', '</math>')
    """
    from regard.core.extras import needed_for

    with needed_for("the lab's report", "lab"):
        from latex2mathml.converter import convert

    typst(latex)  # latex2mathml shows commands that it does not know as they were typed
    text = convert(latex, display="block" if display else "inline")
    # Bars that \left and \right do not pair keep the size of a letter, and no space inside.
    return re.sub(r"<mo>(&#x02016;|\||&#x0007C;)</mo>", r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', text)


def typst(latex: str) -> str:
    """A formula as Typst's math mode has it; ValueError for what is not in the subset.

    >>> typst(r"\\frac{1}{\\sqrt d}")
    'frac(1, sqrt(d))'
    """
    reader = _Reader(latex)
    text = reader.sequence(())
    if reader.token:
        raise reader.error(f"nothing before it that {reader.token} ends")
    return text


class _Reader:
    """Reads LaTeX from the left; `token` is the next piece, empty at the end."""

    def __init__(self, latex: str) -> None:
        self.latex = latex
        self.tokens = iter(_TOKEN.findall(latex))
        self.token = next(self.tokens, "")

    def error(self, expected: str) -> ValueError:
        return ValueError(f"formula: expected {expected}, got {self.latex!r}")

    def take(self) -> str:
        token, self.token = self.token, next(self.tokens, "")
        return token

    def skip_spaces(self) -> None:
        while self.token.isspace():
            self.take()

    def sequence(self, ends: tuple[str, ...]) -> str:
        """All up to one of these tokens, or to the end; digits that follow each other are a number."""
        parts: list[str] = []
        while self.token and self.token not in ends:
            if self.token in ("}", r"\right", r"\end"):
                break
            if self.token.isspace():
                self.take()
            elif number := self._number():
                parts.append(self._attached(number))
            else:
                parts.append(self._attached(self.atom()))
        # Typst shows spaces beside text, and beside nothing else.
        return re.sub(r' ?(#"(?:[^"\\]|\\.)*") ?', r"\1", " ".join(filter(None, parts)))

    def _number(self) -> str:
        number = ""
        while self.token.isdigit() or (number and self.token == "."):
            number += self.take()
        return number

    def _attached(self, base: str) -> str:
        """What was read, with the superscript and the subscript that follow it."""
        up, down = "", ""
        while self.token in ("^", "_", "'"):
            mark = self.take()
            if mark == "'":
                up += "′"
            elif mark == "^":
                up = f"{up} {self.argument()}".strip()
            else:
                down = self.argument()
        marks = [f"{side}: {mark}" for side, mark in (("t", up), ("b", down)) if mark]
        return f"attach({', '.join([base or '#none', *marks])})" if marks else base

    def argument(self) -> str:
        """A group in braces, or a single token."""
        self.skip_spaces()
        if not self.token or self.token == "}":
            raise self.error("an argument")
        return self.take() if self.token.isdigit() else self.atom()

    def raw(self) -> str:
        """The text of a group in braces."""
        self.skip_spaces()
        if self.take() != "{":
            raise self.error("{")
        text = ""
        while self.token != "}":
            if not self.token or self.token in "{<>&" or self.token.startswith("\\"):
                raise self.error("plain text and }")
            text += self.take()
        self.take()
        return text

    def atom(self) -> str:
        token = self.take()
        if token == "{":
            text = self.sequence(())
            if self.take() != "}":
                raise self.error("}")
            return f'class("normal", {text})' if text in ("\\,", "\\.", "\\:") else text or '""'
        if token.startswith("\\"):
            return self.command(token[1:])
        if token == "~":
            return "space"
        if token == "-":
            return "−"
        if token.isalnum():
            return token
        if token in "&#$%":
            raise self.error(f"no {token} here")
        return "\\" + token if token.isascii() else token

    def command(self, name: str) -> str:
        if name in SYMBOLS:
            return SYMBOLS[name]
        if name in FENCES:
            return FENCES[name]
        if name in SPACES:
            return SPACES[name]
        if name in ESCAPED:
            return ESCAPED[name] or "\\" + name
        if name.removesuffix("*") in TEXTS:
            text = _quoted(self.raw())
            if not name.startswith("operatorname"):
                return f"#{text}"
            return f"op({text}, limits: #true)" if name.endswith("*") else f"op({text})"
        if name in FUNCTIONS:
            return f'op("{name}"{", limits: #true" if name in LIMITS else ""})'
        if name in ("frac", "dfrac", "tfrac", "binom"):
            return f"{'binom' if name == 'binom' else 'frac'}({self.argument()}, {self.argument()})"
        if name in LETTERS:
            return LETTERS[name].format(self.argument())
        if name == "sqrt" and self.token == "[":
            self.take()
            index = self.sequence(("]",))
            self.take()
            return f"root({index}, {self.argument()})"
        if name in ACCENTS:
            return ACCENTS[name].format(self.argument())
        if name in SIZES:
            return self.argument()
        if name == "left":
            return self._fenced()
        if name == "begin":
            return self._environment()
        if name == "\\":
            return "\\\n"
        raise self.error(f"commands of the lab's subset of LaTeX (\\{name} is none)")

    def _fence(self) -> str:
        self.skip_spaces()
        return "" if self.token == "." and self.take() else self.atom()

    def _fenced(self) -> str:
        parts = [self._fence(), self.sequence(())]
        if self.take() != r"\right":
            raise self.error(r"\right")
        return f"lr({' '.join(filter(None, [*parts, self._fence()]))})"

    def _environment(self) -> str:
        name = self.raw()
        rows = list(self._rows())
        if self.raw() != name:
            raise self.error(rf"\end{{{name}}}")
        if name == "cases":
            return f"cases({', '.join(' &quad '.join(row) for row in rows)})"
        if name == "aligned":
            return " \\\n".join(" & ".join(row) for row in rows)
        if name not in MATRICES:
            raise self.error(f"an environment of the subset ({name} is none)")
        return f"mat(delim: {MATRICES[name]}, {'; '.join(', '.join(row) for row in rows)})"

    def _rows(self) -> Iterator[list[str]]:
        """The cells of each row up to `\\end`."""
        row: list[str] = []
        while True:
            row.append(self.sequence(("&", r"\\")))
            end = self.take()
            if end != "&":
                if any(row):
                    yield row
                row = []
            if end == r"\end":
                return
            if end not in ("&", r"\\"):
                raise self.error(r"\end")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
