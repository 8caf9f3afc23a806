"""`regard cost`: the cost of attention over length, and where mechanisms cross."""

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
"""The largest number of heads, channels or sequences that can be given."""
LENGTHS = (1024, 8192, 65536)


def cost(
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"One of {CHOICES}. May repeat. Default: softmax, quadratic.", show_default=False
        ),
    ] = None,
    user_mechanisms: Annotated[
        list[str] | None,
        typer.Option(
            "--own",
            metavar="FILE.py:NAME",
            help="A mechanism of your own besides those, counted from its formula. May repeat.",
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
        typer.Option(min=1, max=WIDEST, metavar="N", help="Key/value heads. May repeat. Default: MHA, GQA and MQA."),
    ] = None,
    qk_length: Annotated[
        int, typer.Option(min=1, max=WIDEST, metavar="N", help="Head dimension of queries and keys.")
    ] = 64,
    value_length: Annotated[
        int | None, typer.Option(min=1, max=WIDEST, metavar="N", help="Head dimension of values. Default: qk-length.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=WIDEST, metavar="N", help="Batch size.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join(DTYPES)}. Default: bfloat16, float32 with --measure."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(metavar="MODE", help="prefill: a whole sequence. decode: one new token over a KV cache. Or both."),
    ] = "both",
    window: Annotated[str | None, typer.Option(metavar=WINDOW, help=f"{WINDOW_HELP} All if not given.")] = None,
    is_causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Hide the future in prefill.")] = True,
    embedding_dim: Annotated[
        int | None,
        typer.Option(min=1, max=WIDEST, metavar="N", help="Count the whole layer: projections, and the bottleneck."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw cost over length to this image file.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine: predicted and measured prefill crossover.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with raw numbers.")] = False,
) -> None:
    """The cost of attention over length: FLOPs, bytes, state and activation memory, and where mechanisms cross."""
    names = mechanism or ["softmax", "quadratic"]
    with named(mechanism="own"):
        for text in user_mechanisms or ():
            lookup(text)
    chosen = _chosen([*names, *(user_mechanisms or ())])
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
    report: dict[str, Any] = {"rows": rows, "crossovers": crossovers}
    if measure:
        report["measured"] = _measured(chosen, work, groupings[0])
    if as_json:
        print_json(report)
        return
    _print_cost(rows)
    for crossover in crossovers:
        print(_crossover_line(crossover))
    if measure:
        _print_measured(report["measured"])
    if plot is not None:
        print(f"-> {plot}")


def _chosen(texts: Sequence[str]) -> dict[str, rg.Mechanism]:
    """Mechanisms by their name in tables: without the file, unless two files have the same name."""
    places = {text: text.rpartition(":")[2] for text in dict.fromkeys(texts)}
    names = list(places.values())
    return {text if names.count(name) > 1 else name: from_text(text) for text, name in places.items()}


def _lengths(texts: Sequence[str] | None) -> list[int]:
    """Lengths from options that may repeat and may have several numbers, separated by commas."""
    lengths = []
    for typed, part in ((text, part.strip()) for text in texts or [] for part in text.split(",")):
        length = int(part) if part.isdecimal() and len(part) <= len(str(LONGEST)) else 0
        if not 1 <= length <= LONGEST:
            raise ValueError(f"length: expected whole numbers from 1 to {LONGEST:,}, got {typed[:40]!r}")
        lengths.append(length)
    return list(dict.fromkeys(lengths))


def _three_groupings(num_heads: int) -> list[int]:
    """Key/value heads for MHA, GQA and MQA. GQA has 8, as most models do, or the divisor of the heads nearest to 8."""
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
                    price = rg.cost(mechanism, at)
                    row: dict[str, Any] = {
                        "mechanism": name,
                        "heads": heads_label(work.num_heads, kv),
                        "num_heads": work.num_heads,
                        "num_kv_heads": kv,
                        "mode": mode,
                        "length": length,
                        "flops": price.flops,
                        "bytes": price.bytes,
                        "intensity": price.intensity,
                        "state_bytes": price.state_bytes,
                        "activation_bytes": price.activation_bytes,
                        "parameters": price.parameters,
                        "form": price.form,
                        "note": price.note,
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
    """The lengths from which the first mechanism, or each of the others, stays the cheaper of the two."""
    (first, first_mechanism), *others = mechanisms.items()
    crossovers = []
    for mode, kv, (second, second_mechanism) in product(modes, groupings, others):
        for by in ("flops",) if mode == "prefill" else ("bytes", "flops"):
            at = replace(work, num_kv_heads=kv)
            second_from = mode_crossover(first_mechanism, second_mechanism, at, mode, PRICES[by])
            first_from = (
                mode_crossover(second_mechanism, first_mechanism, at, mode, PRICES[by]) if second_from is None else None
            )
            crossovers.append(
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
    return crossovers


def _crossover_line(crossover: dict[str, Any]) -> str:
    start = f"{_heads(crossover):<9} {crossover['mode']:<8} "
    pair = (crossover["first"], crossover["second"])
    things, by = ("FLOPs", "takes fewer FLOPs") if crossover["by"] == "flops" else ("bytes", "moves fewer bytes")
    if crossover["cheaper"] is None:
        return start + f"{' and '.join(pair)} take equally many {things}"
    dearer = pair[0] if crossover["cheaper"] == pair[1] else pair[1]
    where = "at every length" if crossover["from"] == 1 else f"from {crossover['from']:,} tokens on"
    return start + f"{crossover['cheaper']} {by} than {dearer} {where}"


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

    # A single length makes no line: draw at least two octaves.
    longest = min(max(max(lengths), 4 * min(lengths)), LONGEST)
    shortest = min(min(lengths), longest // 4)
    figure = cost_figure(mechanisms, work, kv_heads=groupings, modes=modes, shortest=shortest, longest=longest)
    save_figure(figure, path)


def _measured(mechanisms: dict[str, rg.Mechanism], work: rg.Work, num_kv_heads: int) -> dict[str, Any]:
    """The prefill crossover of the first two mechanisms, as predicted from this machine's rates and as measured."""
    from regard.commands.suite import LOOKS, ROUNDS, crossing

    if len(mechanisms) < 2:
        raise ValueError("measure: expected two mechanisms to compare, got one")
    (first, first_mechanism), (second, second_mechanism) = list(mechanisms.items())[:2]
    at = mode_work(replace(work, num_kv_heads=num_kv_heads), "prefill", 4096)
    with progress(LOOKS + ROUNDS, "measuring this machine", ticking=False) as advance:
        measurement = crossing(first_mechanism, second_mechanism, at, begin_round=advance)
    predicted, measured = measurement.predicted, measurement.measured
    off = None if predicted is None or measured is None else 100 * (predicted - measured) / measured
    return {
        "first": first,
        "second": second,
        "num_heads": work.num_heads,
        "num_kv_heads": num_kv_heads,
        "dtype": str(work.dtype).removeprefix("torch."),
        "rates": measurement.rates.table,
        "predicted": predicted,
        "measured": measured,
        "difference_percent": off,
    }


def _print_measured(report: dict[str, Any]) -> None:
    shape = f"{report['num_heads']} heads over {report['num_kv_heads']}, {report['dtype']}"
    print(f"\nThis machine, prefill, {shape}:")
    for name, rate in report["rates"].items():
        print(f"  {name} reaches {human(rate['flops_per_second'], 'FLOP/s')}")
    if report["predicted"] is None:
        print(f"  {report['second']} is not predicted to become faster than {report['first']}")
    elif report["measured"] is None:
        print(f"  predicted crossover {report['predicted']:,} tokens; none measured around it")
    else:
        print(
            f"  predicted crossover {report['predicted']:,} tokens, measured {report['measured']:,}: "
            f"{report['difference_percent']:+.0f} %"
        )


def _print_cost(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table with a section for each mode and grouping; numbered notes follow below."""
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
