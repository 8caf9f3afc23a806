"""`regard cost`: what attention costs over length, and where mechanisms cross."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import regard as rg
from regard.commands.common import digits, named, one_of, one_thread, print_json, print_table, progress
from regard.core.cost import LONGEST, MODES, PRICES, heads_label, human, mode_crossover, mode_work
from regard.core.masks.text import WINDOW, WINDOW_HELP, window_from_text
from regard.core.mechanisms.text import CHOICES, from_text, lookup

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
WIDEST = 1 << 16
"""Heads, channels, sequences: the most of them that can be asked about."""
LENGTHS = (1024, 8192, 65536)


def cost(
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"Of {CHOICES}. May repeat. Default: softmax, quadratic.", show_default=False
        ),
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="A mechanism of your own beside those, counted on its own formula. May repeat.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N", help=f"Tokens; may repeat or list with commas. Default: {','.join(map(str, LENGTHS))}."
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, max=WIDEST, metavar="N", help="Query heads. Default: 32, 4 with --measure.")
    ] = None,
    kv_heads: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=WIDEST, metavar="N", help="Key/value heads. May repeat. Default: one each of MHA, GQA, MQA."
        ),
    ] = None,
    qk_length: Annotated[int, typer.Option(min=1, max=WIDEST, metavar="N", help="Length of queries and keys.")] = 64,
    value_length: Annotated[
        int | None, typer.Option(min=1, max=WIDEST, metavar="N", help="Length of values. Default: qk-length.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=WIDEST, metavar="N", help="Sequences at once.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(DTYPES)}. Default: bfloat16, float32 with --measure."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(metavar="MODE", help="prefill: a whole sequence. decode: one new token over a cache. Or both."),
    ] = "both",
    window: Annotated[str | None, typer.Option(metavar=WINDOW, help=f"{WINDOW_HELP} All if not given.")] = None,
    is_causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Hide the future in prefill.")] = True,
    embedding_dim: Annotated[
        int | None,
        typer.Option(min=1, max=WIDEST, metavar="N", help="Count the layer too: its projections, and the bottleneck."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw cost over length into this picture file.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine: predicted and measured prefill crossover.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with raw numbers.")] = False,
) -> None:
    """What attention costs: FLOPs, bytes, state and activation memory over length, and where mechanisms cross."""
    names = mechanism or ["softmax", "quadratic"]
    with named(mechanism="own"):
        for text in own or ():
            lookup(text)
    chosen = _chosen([*names, *(own or ())])
    num_heads = heads or (4 if measure else 32)
    mask = rg.causal if is_causal else None
    if window is not None:
        near = window_from_text("window", window)
        if is_causal and near.after:
            raise ValueError(f"window: expected AFTER = 0, or --no-causal, got {window}")
        mask = near if mask is None else mask & near
    work = rg.Work(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        qk_length=qk_length,
        value_length=value_length or qk_length,
        dtype=one_of("dtype", dtype or ("float32" if measure else "bfloat16"), DTYPES),
        mask=mask,
    )
    lengths = _lengths(length) or list(LENGTHS)
    modes = one_of("mode", mode, {**{name: [name] for name in MODES}, "both": list(MODES)})
    groupings = kv_heads or ([num_heads] if measure else _three_groupings(num_heads))
    with one_thread():
        rows = _cost_rows(chosen, work, groupings, modes, lengths, embedding_dim)
        crossovers = _crossovers(chosen, work, groupings, modes)
        if plot is not None:
            with named(path="plot"):
                _draw_cost(plot, chosen, work, groupings, modes, lengths)
    found: dict[str, Any] = {"rows": rows, "crossovers": crossovers}
    if measure:
        found["measured"] = _measured(chosen, work, groupings[0])
    if as_json:
        print_json(found)
        return
    _print_cost(rows)
    for one in crossovers:
        print(_crossover_line(one))
    if measure:
        _print_measured(found["measured"])
    if plot is not None:
        print(f"-> {plot}")


def _chosen(texts: Sequence[str]) -> dict[str, rg.Mechanism]:
    """Mechanisms by what a table calls them: their name, without the file unless two files have it."""
    places = {text: text.rpartition(":")[2] for text in dict.fromkeys(texts)}
    names = list(places.values())
    return {text if names.count(name) > 1 else name: from_text(text) for text, name in places.items()}


def _lengths(texts: Sequence[str] | None) -> list[int]:
    """Lengths from options that may repeat and may list with commas."""
    lengths = []
    for part in (part.strip() for text in texts or [] for part in text.split(",")):
        length = int(part) if part.isdecimal() and len(part) <= len(str(LONGEST)) else 0
        if not 1 <= length <= LONGEST:
            raise ValueError(f"length: expected whole numbers from 1 to {LONGEST:,}, got {part[:40]!r}")
        lengths.append(length)
    return list(dict.fromkeys(lengths))


def _three_groupings(num_heads: int) -> list[int]:
    """Key/value heads for MHA, GQA and MQA: 8 groups as most models have, or as near to 8 as divides the heads."""
    between = [groups for groups in range(2, num_heads) if num_heads % groups == 0]
    nearest = min(between, key=lambda groups: abs(groups - 8), default=1)
    return list(dict.fromkeys([num_heads, nearest, 1]))


def _cost_rows(
    mechanisms: dict[str, rg.Mechanism],
    work: rg.Work,
    groupings: Sequence[int],
    modes: Sequence[str],
    lengths: Sequence[int],
    embedding_dim: int | None,
) -> list[dict[str, Any]]:
    rows = []
    for mode in modes:
        for kv in groupings:
            for length in lengths:
                at = mode_work(replace(work, num_kv_heads=kv), mode, length)
                for name, mechanism in mechanisms.items():
                    found = rg.cost(mechanism, at)
                    row: dict[str, Any] = {
                        "mechanism": name,
                        "heads": heads_label(work.num_heads, kv),
                        "num_heads": work.num_heads,
                        "num_kv_heads": kv,
                        "mode": mode,
                        "length": length,
                        "flops": found.flops,
                        "bytes": found.bytes,
                        "intensity": found.intensity,
                        "state_bytes": found.state_bytes,
                        "activation_bytes": found.activation_bytes,
                        "parameters": found.parameters,
                        "form": found.form,
                        "note": found.note,
                    }
                    if embedding_dim is not None:
                        layer = rg.layer_cost(at, embedding_dim, mechanism)
                        row["layer"] = {
                            "projection_flops": layer.projections.flops,
                            "projection_bytes": layer.projections.bytes,
                            "flops": layer.flops,
                            "bytes": layer.bytes,
                            "parameters": layer.parameters,
                            "bottleneck": layer.bottleneck,
                        }
                    rows.append(row)
    return rows


def _crossovers(
    mechanisms: dict[str, rg.Mechanism], work: rg.Work, groupings: Sequence[int], modes: Sequence[str]
) -> list[dict[str, Any]]:
    """From which length the first mechanism or another is the cheaper of the two, for good."""
    (first, one), *others = mechanisms.items()
    found = []
    for mode, kv, (second, two) in product(modes, groupings, others):
        for by in ("flops",) if mode == "prefill" else ("bytes", "flops"):
            at = replace(work, num_kv_heads=kv)
            second_from = mode_crossover(one, two, at, mode, PRICES[by])
            first_from = mode_crossover(two, one, at, mode, PRICES[by]) if second_from is None else None
            found.append(
                {
                    "first": first,
                    "second": second,
                    "heads": heads_label(work.num_heads, kv),
                    "num_heads": work.num_heads,
                    "num_kv_heads": kv,
                    "mode": mode,
                    "by": by,
                    "cheaper": second if second_from else first if first_from else None,
                    "from": second_from or first_from,
                }
            )
    return found


def _crossover_line(found: dict[str, Any]) -> str:
    start = f"{_heads(found):<9} {found['mode']:<8} "
    pair = (found["first"], found["second"])
    things, by = ("FLOPs", "takes fewer FLOPs") if found["by"] == "flops" else ("bytes", "moves fewer bytes")
    if found["cheaper"] is None:
        return start + f"{' and '.join(pair)} are alike in {things}"
    dearer = pair[0] if found["cheaper"] == pair[1] else pair[1]
    where = "at every length" if found["from"] == 1 else f"from {found['from']:,} tokens on"
    return start + f"{found['cheaper']} {by} than {dearer} {where}"


def _draw_cost(
    path: Path,
    mechanisms: dict[str, rg.Mechanism],
    work: rg.Work,
    groupings: Sequence[int],
    modes: Sequence[str],
    lengths: Sequence[int],
) -> None:
    from regard.core.cost_figure import cost_figure
    from regard.core.files import save_figure

    # One length is no line: two octaves from it then, or to it.
    longest = min(max(max(lengths), 4 * min(lengths)), LONGEST)
    shortest = min(min(lengths), longest // 4)
    figure = cost_figure(mechanisms, work, kv_heads=groupings, modes=modes, shortest=shortest, longest=longest)
    save_figure(figure, path)


def _measured(mechanisms: dict[str, rg.Mechanism], work: rg.Work, num_kv_heads: int) -> dict[str, Any]:
    """The prefill crossover of the first two mechanisms as this machine's rates predict it, and as it is."""
    from regard.commands.suite import LOOKS, ROUNDS, crossing

    if len(mechanisms) < 2:
        raise ValueError("measure: expected two mechanisms to compare, got one")
    (first, one), (second, two) = list(mechanisms.items())[:2]
    at = mode_work(replace(work, num_kv_heads=num_kv_heads), "prefill", 4096)
    with progress(LOOKS + ROUNDS, "measuring this machine", ticking=False) as advance:
        found = crossing(one, two, at, begin_round=advance)
    predicted, measured = found.predicted, found.measured
    off = None if predicted is None or measured is None else 100 * (predicted - measured) / measured
    return {
        "first": first,
        "second": second,
        "num_heads": work.num_heads,
        "num_kv_heads": num_kv_heads,
        "dtype": str(work.dtype).removeprefix("torch."),
        "rates": found.rates.table,
        "predicted": predicted,
        "measured": measured,
        "difference_percent": off,
    }


def _print_measured(found: dict[str, Any]) -> None:
    shape = f"{found['num_heads']} heads over {found['num_kv_heads']}, {found['dtype']}"
    print(f"\nThis machine, prefill, {shape}:")
    for name, rate in found["rates"].items():
        print(f"  {name} reaches {human(rate['flops_per_second'], 'FLOP/s')}")
    if found["predicted"] is None:
        print(f"  {found['second']} is not predicted to become faster than {found['first']}")
    elif found["measured"] is None:
        print(f"  predicted crossover {found['predicted']:,} tokens; none measured around it")
    else:
        print(
            f"  predicted crossover {found['predicted']:,} tokens, measured {found['measured']:,}: "
            f"{found['difference_percent']:+.0f} %"
        )


def _print_cost(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table, a section for each mode and grouping; notes are numbered and follow below."""
    notes = list(dict.fromkeys(row["note"] for row in rows if row["note"]))
    shown = []
    for row in rows:
        cells = {
            "mechanism": row["mechanism"],
            "heads": _heads(row),
            "mode": row["mode"],
            "length": f"{row['length']:,}",
            "FLOPs": human(row["flops"]),
            "bytes": human(row["bytes"], "B"),
            "FLOPs/byte": digits(row["intensity"]),
            "state": human(row["state_bytes"], "B"),
            "activation": human(row["activation_bytes"], "B"),
            "parameters": human(row["parameters"]),
            "form": row["form"],
            "note": f"({notes.index(row['note']) + 1})" if row["note"] else "",
        }
        if "layer" in row:
            cells |= {"layer FLOPs": human(row["layer"]["flops"]), "bottleneck": row["layer"]["bottleneck"]}
        shown.append(cells)
    numbers = ("length", "FLOPs", "bytes", "FLOPs/byte", "state", "activation", "parameters", "layer FLOPs")
    empty = {"note": not notes, "parameters": not any(row["parameters"] for row in rows)}
    unused = [name for name in empty if empty[name]]
    print_table(shown, right=numbers, section=("heads", "mode"), keys=("mechanism", "length"), drop=unused)
    for number, note in enumerate(notes, start=1):
        print(f"({number}) {note}")
    if notes:
        print()


def _heads(row: dict[str, Any]) -> str:
    return f"{row['heads']} {row['num_heads']}/{row['num_kv_heads']}"
