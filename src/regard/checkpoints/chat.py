"""Chat templates: programs that come with a checkpoint, rendered in jinja2's sandbox with a limit on memory and time.

The sandbox keeps a template from files and functions, but not from building ten gigabytes of spaces, nor from nested
loops. So every render has a budget in bytes, and everything that takes memory or time is charged before it happens: a
step of a loop, an operation, each number and character that is built or read. The size of a result is computed from the
operands. The same template and messages always cost the same, so a template that renders does so on any machine.

Each way to build large values is metered in one place: operators (`call_binop`), literals, slices, comparisons,
concatenation and output (`_metered`, which rewrites the parsed template), filters and tests (`_filter`, `_test`), and
calls (`call`), which allow methods by name.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from regard.checkpoints.errors import CheckpointError
from regard.core.extras import needed_for

if TYPE_CHECKING:
    from jinja2 import nodes

MOST_LETTERS, MOST_STATEMENTS = 2**15, 20
"""The longest template, in characters (the longest in use has 17,000), and the deepest nesting (Python allows 20)."""
MOST_BYTES, MOST_BYTES_A_BYTE = 2**25, 256
"""The budget of a render in bytes: a fixed part, and a part for each byte of its input."""
MOST_DEPTH, MOST_BITS = 64, 4096
"""The deepest nesting of values, and the longest integer."""
STEP, LETTER = 64, 4
"""Bytes that are charged for an object or a step of a loop, and for a character."""

FREE = {
    *("length", "count", "first", "last", "default", "d", "attr", "items", "safe"),
    *("map", "select", "reject", "selectattr", "rejectattr"),
}
"""Filters that do not read a value's items, or read them lazily, one by one."""
REFUSED = {"pprint", "random", "urlize", "wordwrap", "xmlattr"}
"""Filters that no chat needs, and whose cost is hard to predict."""
LISTED = {"batch", "dictsort", "groupby", "list", "max", "min", "slice", "sort", "sum", "unique", "wordcount"}
"""Filters that build an object for each item, or compare items."""
COMPARED = {"!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt"}
COMPARED |= {"ne"}
"""Tests that read the whole value."""
METHODS: dict[type, set[str]] = {
    str: {
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal"),
        *("isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower"),
        *("lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip"),
        *("startswith", "strip", "swapcase", "title", "upper"),
        *("center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "rsplit", "split"),
        *("splitlines", "zfill"),
    },
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
}
"""The methods that a template may call, by type."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text that a template renders for some values, with the helper functions that transformers gives templates.

    >>> render("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {"messages": [{"role": "user",
    ... "content": "hi"}]})
    '<user>hi'
    >>> render("{{ 'x' * 10 ** 10 }}", {})
    Traceback (most recent call last):
    regard.checkpoints.errors.CheckpointError: chat_template: expected a template that needs at most 33,570,816 bytes \
for these messages, got one that needs more
    """
    if len(template) > MOST_LETTERS:
        raise CheckpointError(f"chat_template: expected at most {MOST_LETTERS:,} characters, got {len(template):,}")
    try:
        return str(_environment(values).from_string(template).render(**values))
    except CheckpointError:
        raise
    except Exception as error:  # a template is a program and may raise anything
        raise CheckpointError(
            f"chat_template: expected messages that the template accepts, got {error!s:.500}"
        ) from error


class Budget:
    """The bytes that a render may still spend."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.most = self.left = 2**62
        self.most = self.left = MOST_BYTES + MOST_BYTES_A_BYTE * self.size(dict(values))

    def spend(self, count: int) -> None:
        """Take `count` bytes from the budget; raise CheckpointError if there are too few."""
        self.left -= count
        if self.left < 0:
            raise CheckpointError(
                f"chat_template: expected a template that needs at most {self.most:,} bytes for these messages, "
                "got one that needs more"
            )

    def size(self, value: Any) -> int:
        """The bytes of a value; an object that it contains twice counts twice. Raises if they exceed the budget."""
        from jinja2.utils import Namespace

        total, inside = 0, [(value, 0)]
        while inside:
            value, depth = inside.pop()
            total += STEP
            if isinstance(value, str | bytes):
                total += LETTER * len(value)
            elif isinstance(value, int):
                if value.bit_length() > MOST_BITS:
                    raise CheckpointError(
                        f"chat_template: expected numbers of at most {MOST_BITS} bits, got a longer one"
                    )
            elif isinstance(value, range):
                total += STEP * len(value)
            else:
                if isinstance(value, Namespace):
                    value = value._Namespace__attrs
                if isinstance(value, Mapping):
                    value = [part for pair in value.items() for part in pair]
                if isinstance(value, list | tuple | set | frozenset | type({}.keys()) | type({}.values())):
                    if depth == MOST_DEPTH:
                        raise CheckpointError(
                            f"chat_template: expected values nested at most {MOST_DEPTH} deep, got deeper ones"
                        )
                    inside.extend((part, depth + 1) for part in value)
            if total + STEP * len(inside) > self.left:
                self.spend(total + STEP * len(inside))
        return total

    def measured(self, value: Any) -> Any:
        """The value, after its size is charged; the items of an iterator are charged one by one."""
        if isinstance(value, Iterator):
            return self.iterated(value)
        self.spend(self.size(value))
        return value

    def iterated(self, values: Any, nodes: int = 1) -> Any:
        """Values to iterate over, each charged as `nodes` steps."""
        if isinstance(values, Iterator):
            return (self.measured_item(item, nodes) for item in values)
        if hasattr(values, "__len__"):
            self.spend(STEP * nodes * len(values))
        return values

    def measured_item(self, item: Any, nodes: int) -> Any:
        self.spend(STEP * nodes)
        return item

    def joined(self, parts: Iterable[str]) -> str:
        """The concatenated parts; jinja2 joins a template's output with this."""
        kept = []
        for part in parts:
            self.spend(8 + LETTER * len(part))
            kept.append(part)
        return "".join(kept)

    def printf(self, form: str, values: Any) -> int:
        """An upper bound for the bytes of `form % values`: the widths, and all values at each placeholder."""
        if "*" in form:
            raise CheckpointError("chat_template: expected a format with fixed widths, got a width from its values (*)")
        return form.count("%") * (self.size(values) + LETTER * _largest_number(form))

    def format(self, form: str, values: Any) -> int:
        """An upper bound for the bytes of `form.format(values)`."""
        if re.search(r"\{[^{}]*\{", form.replace("{{", "")):
            raise CheckpointError(
                "chat_template: expected a format with fixed widths, got a width from its values ({…{…}})"
            )
        return form.count("{") * (self.size(values) + LETTER * _largest_number(form))


def _largest_number(form: str) -> int:
    return max((int(digits[:18]) for digits in re.findall(r"\d+", form)), default=0)


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _parts(text: str, separator: Any = None) -> int:
    """An upper bound for the number of parts that a text is split into."""
    return text.count(separator) + 1 if isinstance(separator, str) and separator else len(text) // 2 + 1


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return LETTER * (str(text).count(str(old)) + 1) * len(str(new))


# The bytes that a filter or a method builds beyond the size of its operands.
GROWING: dict[str, Callable[..., int]] = {
    "indent": lambda text, width=4, *_, **__: (
        LETTER * (str(text).count("\n") + 1) * (width if isinstance(width, int) else len(str(width)))
    ),
    "join": lambda values, text="", *_, **__: LETTER * _length(values) * len(str(text)),
    "replace": _replaced,
    "expandtabs": lambda text, tabsize=8: LETTER * text.count("\t") * tabsize,
    "rsplit": lambda text, sep=None, maxsplit=-1: STEP * _parts(text, sep),
    "split": lambda text, sep=None, maxsplit=-1: STEP * _parts(text, sep),
    "splitlines": lambda text, keepends=False: STEP * (len(text) + 1),
}


def _environment(values: Mapping[str, Any]) -> Any:
    with needed_for("a chat template"):
        from jinja2 import TemplateError, Undefined, ext, nodes
        from jinja2.parser import Parser
        from jinja2.runtime import LoopContext, Macro
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Cycler, Joiner, Namespace

    budget = Budget(values)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
        measured, iterated, spend = budget.measured, budget.iterated, budget.spend
        concat = budget.joined

        def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
            return super()._generate(_metered(source), *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, int | float), isinstance(right, int | float)
            budget.spend(budget.size(left) + budget.size(right))
            if operator == "*" and numbers[0] != numbers[1]:
                count, repeated = (left, right) if numbers[0] else (right, left)
                budget.spend(budget.size(repeated) * max(0, int(count)))
            elif operator == "**" and isinstance(left, int) and isinstance(right, int):
                budget.size(1 << min(MOST_BITS, left.bit_length() * max(0, right)))
            elif operator == "%" and isinstance(left, str):
                budget.spend(budget.printf(left, right))
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __target: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (jinja2's)
            budget.spend(STEP)
            owner = getattr(getattr(__target, "__wrapped__", __target), "__self__", None)
            if isinstance(__target, Macro | Undefined) or owner is budget:
                return super().call(__context, __target, *args, **kwargs)
            options = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            budget.spend(4 * budget.size((args, options)))
            if isinstance(__target, LoopContext | Joiner) or isinstance(owner, LoopContext | Cycler):
                return super().call(__context, __target, *args, **kwargs)
            if __target in (Namespace, Cycler, Joiner) or __target in helpers:
                return super().call(__context, __target, *args, **kwargs)
            name = getattr(__target, "__name__", "")
            kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
            if kind is None or name not in METHODS[kind]:
                raise CheckpointError(f"chat_template: expected an allowed method, got {name or __target!r:.80}")
            budget.spend(0 if kind is dict and name != "copy" else 4 * budget.size(owner))
            budget.spend(STEP * sum(abs(number) for number in args if isinstance(number, int)))
            if name in ("format", "format_map"):
                budget.spend(budget.format(str(owner), (args, options)))
            elif name == "join":
                args = tuple(list(budget.iterated(iter(values))) for values in args)
                budget.spend(budget.size(args) + GROWING["join"](*args, owner))
            elif name in GROWING:
                budget.spend(GROWING[name](owner, *args, **options))
            result = super().call(__context, __target, *args, **kwargs)
            return budget.measured(result) if kind is str else result

    class Generation(ext.Extension):
        """{% generation %} marks the model's text for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        budget.spend(256 * len(form))  # no strftime result is longer
        return datetime.now().strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        inserted = (indent if isinstance(indent, int) else _length(indent)) + len(str(options))
        budget.spend(budget.size(value) * (2 + MOST_DEPTH * LETTER * max(0, inserted) // STEP))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.filters = {
        name: _filter(name, function, budget) for name, function in environment.filters.items() if name not in REFUSED
    }
    environment.tests = {
        name: _test(function, budget) if name in COMPARED else function for name, function in environment.tests.items()
    }
    del environment.globals["lipsum"]
    helpers = [
        raise_exception,
        strftime_now,
        lambda *args, **kwargs: dict(*args, **kwargs),
        environment.globals["range"],
    ]
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "dict": helpers[2]}
    return environment


def _filter(name: str, function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """The filter; its arguments are charged before it runs, its result after."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2 passes a context or an environment first

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget.spend(STEP)
        if name in FREE:
            result = function(*args, **kwargs)
            return budget.iterated(result) if isinstance(result, Iterator) else result
        if name in LISTED or name == "join":
            args = tuple(list(budget.iterated(value)) if isinstance(value, Iterator) else value for value in args)
        operands = (*args[first:], *kwargs.values())
        budget.spend((16 if name in LISTED else 4) * budget.size(operands))
        budget.spend(STEP * sum(abs(number) for number in operands[1:] if isinstance(number, int)))
        if name == "format":
            budget.spend(budget.printf(str(operands[0]), operands[1:]))
        elif name == "sum" and not all(isinstance(number, int | float | str | None) for number in operands[1:]):
            raise CheckpointError("chat_template: expected a sum that starts with a number, got another start")
        elif name in GROWING:
            budget.spend(GROWING[name](*args[first:], **kwargs))
        return budget.measured(function(*args, **kwargs))

    return paid


def _test(function: Any, budget: Budget) -> Callable[..., Any]:
    @wraps(function)
    def paid(*args: Any) -> Any:
        budget.spend(budget.size(args))
        return function(*args)

    return paid


def _metered(template: "nodes.Template") -> "nodes.Template":
    """The parsed template, rewritten so that nodes that build or read a value and repeated bodies are charged."""
    from jinja2 import nodes

    elsewhere = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)

    def call(name: str, *args: Any) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)

    def measured(node: Any) -> Any:
        return node if isinstance(node, nodes.Const | nodes.TemplateData) else call("measured", node)

    def count(*parts: nodes.Node | None) -> int:
        return sum(1 + sum(1 for _ in part.find_all(nodes.Node)) for part in parts if part is not None)

    def rewritten(node: Any, depth: int) -> Any:
        depth += isinstance(node, nodes.Stmt)
        if isinstance(node, elsewhere):
            raise CheckpointError(f"chat_template: expected a single template, got {type(node).__name__}")
        if depth > MOST_STATEMENTS:
            raise CheckpointError(
                f"chat_template: expected statements nested at most {MOST_STATEMENTS} deep, got deeper ones"
            )
        repeated = isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        steps = count(*node.body) if repeated else 0
        tested = count(node.test) if isinstance(node, nodes.For) else 0
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, name, rewritten(value, depth))
            elif isinstance(value, list):
                inside = [rewritten(part, depth) if isinstance(part, nodes.Node) else part for part in value]
                setattr(node, name, inside)
        if repeated:
            node.body = [nodes.ExprStmt(call("spend", nodes.Const(STEP * steps))), *node.body]
        if isinstance(node, nodes.For):
            node.iter = call("iterated", node.iter, nodes.Const(1 + tested))
        elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return measured(node)
        elif isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Slice):
                return measured(node)
            node.arg = measured(node.arg)
        elif isinstance(node, nodes.Concat | nodes.Output):
            node.nodes = [measured(part) for part in node.nodes]
        elif isinstance(node, nodes.Compare | nodes.Operand):
            node.expr = measured(node.expr)
        elif isinstance(node, nodes.Call) and node.dyn_args is not None:
            node.dyn_args = measured(node.dyn_args)
        return node

    metered = rewritten(template, 0)
    metered.set_environment(template.environment)
    return metered
