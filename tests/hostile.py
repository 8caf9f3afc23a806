"""Damaged and hostile files, made from good ones by seeded mutations.

Every mutation must be read, or refused with CheckpointError, within the format's limits of CPU time and memory; the
operating system enforces a memory limit, too. Both the readers and the public functions are tried: `rg.load` and a
forward pass, `Prompt.load`, chat templates. `python tests/hostile.py --mutations 20000` runs more mutations than the
tests do. A failure prints the seed, the format, the number and the kind of the mutation, and keeps the file.
"""

import argparse
import copy
import faulthandler
import io
import json
import os
import random
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from hostile_formats import FORMATS, TEMPLATE
from regard.checkpoints.errors import CheckpointError

LIMIT = 2**30
"""Bytes of address space for the whole process: an attempt to allocate more fails."""
HANG = 60
NUMBERS = [0, 1, -1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 0.5, 1e400]
NAMES = [
    "",
    ".",
    "..",
    "../a.safetensors",
    "/etc/passwd",
    "a\0b",
    "model.safetensors.index.json",
    "C:\\a.bin",
    "é" * 300,
]
# What makes much out of little, to be put anywhere into a template.
GROWTH = [
    *("'%10000000000d' % 1", "'%*d' % (9999999999, 1)", "'%.999999999f' % 1.5", "[[0]*9999]*9999", "'x' * 10**10"),
    *("'x'|center(1000000000)", "'x'.center(1000000000)", "'x'.zfill(999999999)", "'{:9999999999}'.format(1)"),
    *("'{:{}}'.format(1, 9999999999)", "('x'*99999).replace('x', 'y'*99999)", "('x'*99999)|replace('', 'y'*99999)"),
    *("range(99999)|join('x'*99999)", "('\\n'*99999)|indent(99999)", "[1]|batch(999999999, 0)|list", "9**9**9**9"),
    *("1.5|round(99999999, 'ceil')", "([[0]]*99999)|sum(start=[])", "(5).to_bytes(9999999999, 'big')", "lipsum(99999)"),
    *(
        "([0]*9999)|tojson(indent=99999)",
        "'\\t'.expandtabs(999999999)",
        "dict.fromkeys(range(99999))",
        "messages * 9999999",
    ),
    *("strftime_now('%999999999Y')", "range(99999)|map('center', 99999)|list", "('1'*99999)|int(base=2)", "f(f)"),
    *(
        "('x'*99999).join('y'*99999)",
        "'a'.translate({97: 'x'*99999})",
        "cycler('x'*999999).next() * 99",
        "ns.x * 99999",
    ),
]
STATEMENTS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% for i in range(99) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ {}[ns.l] }}",
    "{% for i in range(99) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l == ns.l }}",
    "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{% macro g(n) %}{% if n %}{{ g(n - 1) }}{{ g(n - 1) }}{% endif %}{% endmacro %}{{ g(60) }}",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "{% for i in range(99999) %}" + "{% if a %}x{% endif %}" * 999 + "{% endfor %}",
    "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{{ " + "(" * 9999 + " }}",
    "".join(f"{{% set a{number} = 'x' * 4000000 %}}" for number in range(999)),
]


def templated(data, rng):
    """A template with an expression or statement that grows, or with two of its pieces exchanged."""
    text = data.decode()
    pieces = [text[a:b] for a, b in spans(text)]
    choice = rng.randrange(4)
    if choice == 0:
        at = rng.choice([at for at, piece in enumerate(pieces) if piece.startswith("{{")])
        pieces[at] = "{{ " + rng.choice(GROWTH) + rng.choice(["", "", "|length", "|string|length", " ~ ns.x"]) + " }}"
    elif choice == 1:
        pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(STATEMENTS))
    elif choice == 2:
        value = f"{{% set ns.x = {rng.choice(GROWTH)} %}}{{% set ns.l = [ns.x] + ns.l %}}"
        pieces.insert(rng.randrange(len(pieces) + 1), value)
    else:
        a, b = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        pieces[a], pieces[b] = pieces[b], pieces[a]
    return "".join(pieces).encode()


def spans(text):
    """The start and end of each tag, and of each text between tags."""
    edges = [0]
    for opening, closing in (("{%", "%}"), ("{{", "}}")):
        at = text.find(opening)
        while at >= 0:
            edges += [at, text.find(closing, at) + 2]
            at = text.find(opening, at + 2)
    edges = sorted({*edges, len(text)})
    return list(pairwise(edges))


def flip(data, rng):
    mutated = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
    return bytes(mutated)


def extreme(data, rng):
    """Overwrite bytes somewhere, mostly in the header, with an impossible count, length or offset."""
    mutated = bytearray(data)
    at = rng.randrange(min(len(mutated), rng.choice([16, 32, 512, len(mutated)])))
    word = rng.choice([2**63, 2**63 - 1, 2**64 - 1, 2**62, 2**32, 2**31, len(data), len(data) + 1, 2**61 + 1, 0])
    word = struct.pack("<Q", word)[: rng.choice([4, 8])]
    mutated[at : at + len(word)] = word
    return bytes(mutated[: len(data)])


def cut(data, rng):
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:a] + data[b:]


def repeat(data, rng):
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:b] + data[a:b] + data[b:]


def noise(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.choice([1, 4, 64])) + data[at + rng.choice([0, 1, 4, 64]) :]


def twist(value, rng):
    """A JSON value with a change somewhere: another number, name, type or place."""
    value = copy.deepcopy(value)
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    node, key = rng.choice(places)
    other, there = rng.choice(places)
    choice = rng.randrange(6)
    if choice == 0:
        node[key] = rng.choice(NUMBERS)
    elif choice == 1:
        node[key] = rng.choice(NAMES)
    elif choice == 2:
        node[key] = rng.choice([None, True, [], {}, [[]], {"a": {}}, [0, 0], [2**32, 2**32], [0] * 100])
    elif choice == 3:
        node[key] = copy.deepcopy(other[there])
    elif choice == 4 and isinstance(node, dict):
        node[rng.choice(NAMES)] = node.pop(key)
    else:
        del node[key]
    return value


def structured(name, data, rng):
    """`twist` the JSON inside of a format, packed correctly again, so that a reader gets as far as the change."""
    if FORMATS[name].text:
        return json.dumps(twist(json.loads(data), rng)).encode()
    if name == "template":
        return templated(data, rng)
    if name in ("safetensors", "weights", "prompt"):
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        if name == "prompt" and rng.randrange(4):  # what Prompt.save says of its state
            metadata = header["__metadata__"]
            key = next(iter(metadata))
            metadata[key] = json.dumps(twist(json.loads(metadata[key]), rng))
        else:
            header = twist(header, rng)
        packed = json.dumps(header).encode()
        return struct.pack("<Q", len(packed)) + packed + data[8 + length :]
    if name == "bin":
        return repack(data, rng)
    return extreme(extreme(data, rng), rng)


def repack(data, rng):
    """A zip archive with a changed record whose checksum is right."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w") as new:
        names = old.namelist()
        chosen = rng.choice([n for n in names if n.endswith("data.pkl")] * 4 + names)
        for name in names:
            record = old.read(name)
            if name == chosen and record:
                record = rng.choice([flip, flip, extreme, cut, noise])(record, rng)
            new.writestr(name, record, rng.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED]))
    return packed.getvalue()


def bombs(name, data):
    """Handmade files that try to use much time or memory, through JSON if the format has any."""
    texts = {
        "deep list": "[" * 100_000,
        "deep object": '{"a name of some length": ' * 50_000 + "1" + "}" * 50_000,
        "digits": '{"a": ' + "9" * 100_000 + "}",
        "exponent": '{"a": 1e' + "9" * 10_000 + "}",
        "many": "[" + "[]," * 100_000 + "[]]",
        "surrogate": '{"\\ud800": "\\udfff"}',
        "not an object": "[]",
        "nothing": "{}",
    }
    for kind, text in texts.items():
        if FORMATS[name].text:
            yield kind, text.encode()
        elif name == "safetensors":
            (length,) = struct.unpack_from("<Q", data)
            yield kind, struct.pack("<Q", len(text)) + text.encode() + data[8 + length :]
    if name == "safetensors":
        for length in (2**64 - 1, 2**63, len(data), len(data) - 7, 2**40, 0):
            yield f"header length {length}", struct.pack("<Q", length) + data[8:]
    if name == "template":
        for statement in STATEMENTS:
            yield "statement", TEMPLATE[: TEMPLATE.index("{% macro")].encode() + statement.encode()
        for expression in GROWTH:
            yield "expression", b"{{ " + expression.encode() + b" }}"
    if name == "gguf":
        for count in (2**64 - 1, 2**63, 2**61, 2**32, 10_000_000):
            yield f"{count} tensors", data[:8] + struct.pack("<Q", count) + data[16:]
            yield f"{count} keys", data[:16] + struct.pack("<Q", count) + data[24:]


def mutations(name, data, count, seed):
    """`count` pairs of a kind and a mutated file: truncated at evenly spaced positions, then bombs, then random."""
    cuts = FORMATS[name].cuts
    fixed = [(f"cut at {part}/{cuts}", data[: len(data) * part // cuts]) for part in range(cuts)]
    fixed += bombs(name, data)
    for number in range(count):
        if number < len(fixed):
            yield fixed[number]
            continue
        rng = random.Random(f"{seed} {name} {number}")
        kind = rng.choice(["flip", "flip", "extreme", "extreme", "cut", "repeat", "noise", *["structured"] * 5])
        yield kind, structured(name, data, rng) if kind == "structured" else globals()[kind](data, rng)


def attempt(form, path, expected):
    """Returns "read" or "refused"; AssertionError for everything else. Tracing memory takes additional time."""
    if not form.traced:
        outcome, read, seconds = timed(form, path)
        assert seconds <= form.seconds, f"took {seconds:.3f} s"
        return outcome
    size = path.stat().st_size
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    outcome, read, seconds = timed(form, path)
    memory = tracemalloc.get_traced_memory()[1] - before
    if seconds > form.seconds:  # once more, untraced: the first of a kind may have to import something
        tracemalloc.stop()
        outcome, read, seconds = timed(form, path)
        tracemalloc.start()
    assert seconds <= form.seconds, f"took {seconds:.3f} s"
    assert memory <= 2 * size + form.memory, f"took {memory:,} bytes of memory for a file of {size:,}"
    assert outcome == "refused" or not form.counted or read == expected, f"read {read} tensors of {expected}"
    return outcome


def timed(form, path):
    before = time.process_time()
    try:
        return "read", form.read(path), time.process_time() - before
    except CheckpointError as error:
        if isinstance(error.__cause__, MemoryError):
            raise AssertionError("took all the memory it could get") from error
        return "refused", None, time.process_time() - before
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise AssertionError(f"raised {type(error).__name__}: {error}") from error


def run(name, count, seed, folder, advance=lambda: None):
    """Try `count` mutations of a format. Returns the outcomes; AssertionError for the first mutation that fails."""
    # One watchdog for all: threads that come and go while tracemalloc starts and stops crash the interpreter.
    form = FORMATS[name]
    faulthandler.dump_traceback_later(HANG + count * form.seconds, exit=True)
    folder.mkdir(parents=True)
    form.make(folder)
    path = folder / form.file
    good = path.read_bytes()
    expected = form.read(path)
    outcomes = Counter()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + LIMIT, limits[1]))
    if form.traced:
        tracemalloc.start()
    try:
        for number, (kind, data) in enumerate(mutations(name, good, count, seed)):
            path.write_bytes(data)
            try:
                outcomes[attempt(form, path, expected)] += 1
            except AssertionError as error:
                kept = path.with_name(f"failed-{seed}-{number}-{path.name}")
                kept.write_bytes(data)
                message = f"{name}, seed {seed}, mutation {number} ({kind}): {error}; kept in {kept}"
                raise AssertionError(message) from error
            advance()
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        faulthandler.cancel_dump_traceback_later()
    return outcomes


def address_space():
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def show(progress, task):
    progress.advance(task)
    if progress.tasks[task].completed % 100 == 0:
        progress.refresh()


def main():
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=20_000, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where a file that got through is kept")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="hostile-"))
    torch.set_num_threads(1)
    os.environ["RUST_BACKTRACE"] = "0"  # tokenizers panics on some files; that it is caught is what matters
    total, failures = Counter(), []
    began = time.monotonic()
    with Progress(auto_refresh=False) as progress:
        for name in options.formats:
            task = progress.add_task(f"{name:12}", total=options.mutations)
            try:
                folder = out / f"{name.replace(' ', '-')}-{options.seed}-{time.time_ns()}"
                total += run(name, options.mutations, options.seed, folder, partial(show, progress, task))
            except AssertionError as error:
                failures.append(str(error))
    for failure in failures:
        print(failure)
    print(
        f"{sum(total.values()):,} mutations of {len(options.formats)} formats, seed {options.seed}, "
        f"{time.monotonic() - began:.0f} s: {total['read']:,} read, {total['refused']:,} refused, "
        f"{len(failures)} got through"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
