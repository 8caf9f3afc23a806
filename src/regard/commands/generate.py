"""`regard generate`: continue texts with a model."""

import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.text import Text

import regard as rg
from regard.checkpoints import load_with, resolve
from regard.commands.common import Device, digits, one_of, output, print_table, read_text, waiting
from regard.commands.models import ANY_SOURCE, FILE_DTYPES, MechanismName
from regard.core.cost import accumulator, human
from regard.core.mechanisms.text import lookup
from regard.inference.generation.engine import Growth, Row
from regard.inference.generation.request import as_generative, begin, check_counts, limits_of, seeds_of
from regard.inference.generation.sampling import Sampling
from regard.models.base import expect

if TYPE_CHECKING:
    from regard.models.base import Model
    from regard.models.stored import UserMechanism

TOGETHER = 16
"""Sequences per batch: more would need more memory and gain little on a CPU."""
INT8 = {"int8": torch.int8}

Source = Annotated[str, typer.Argument(metavar="MODEL", help=ANY_SOURCE, show_default=False)]
TopK = Annotated[int | None, typer.Option(metavar="N", help="Draw from the N likeliest tokens only.")]
TopP = Annotated[
    float | None, typer.Option(metavar="X", help="Draw from the likeliest tokens that together have this probability.")
]
MinP = Annotated[
    float | None, typer.Option(metavar="X", help="Draw from tokens at least this fraction as likely as the likeliest.")
]
RepetitionPenalty = Annotated[float, typer.Option(metavar="X", help="Above 1, earlier tokens become less likely.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text. May repeat.", show_default=False),
]
StopToken = Annotated[
    list[int] | None, typer.Option(metavar="N", help="Stop at this token id. May repeat.", show_default=False)
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same texts.")]
Weights = Annotated[str | None, typer.Option(metavar="NAME", help="int8: faster on a CPU, less exact.")]
StateStorage = Annotated[
    str | None, typer.Option("--state", metavar="NAME", help="int8: a smaller KV cache, less exact.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"One of {', '.join(FILE_DTYPES)}. Default: the file's, float32 for .gguf files."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options that `generate` and `chat` share, checked."""

    source: str
    sampling: Sampling
    stream: dict[str, Any]
    """Options of `rg.stream`."""
    quantized: bool
    mechanism: "UserMechanism | None"
    dtype: torch.dtype | None
    device: str

    def load(self) -> "Model":
        with waiting(f"loading {self.source}"):
            model = load_with(self.source, self.mechanism, dtype=self.dtype, device=self.device)
            return rg.quantized(model) if self.quantized else model


def plan(options: Mapping[str, Any]) -> Plan:
    """Check the parameters of `generate` or `chat` that both have, before the model is loaded, which takes seconds.

    `options` are a command's parameters by name; other names in it are ignored.
    """
    sampling = Sampling(**{field.name: options[field.name] for field in fields(Sampling)})
    seeds_of(options["seed"], 1, 1)
    stops = (*(options["stop"] or ()), *(options["stop_token"] or ()))
    if "" in stops:
        raise ValueError("stop: expected a text, got ''")
    for token in options["stop_token"] or ():
        if token < 0:
            raise ValueError(f"stop_token: expected a token from 0, got {token}")
    state, dtype, device, mechanism = (options[name] for name in ("state", "dtype", "device", "mechanism"))
    storage = None if state is None else one_of("state", state, INT8)
    wanted = None if dtype is None else one_of("dtype", dtype, FILE_DTYPES)
    quantized = options["weights"] is not None
    if quantized:
        one_of("weights", options["weights"], INT8)
        if wanted not in (None, torch.float32):
            raise ValueError(f"dtype: expected float32, which int8 weights compute in, got {dtype}")
        if device != "cpu":
            raise ValueError(f"device: expected cpu, on which int8 weights compute, got {device}")
        wanted = torch.float32
    checked = Plan(
        source=options["source"],
        sampling=sampling,
        stream={**asdict(sampling), "stop": stops, "storage": storage, "max_new_tokens": options["max_new_tokens"]},
        quantized=quantized,
        mechanism=None if mechanism is None else lookup(mechanism),
        dtype=wanted,
        device=device,
    )
    resolve(checked.source)
    return checked


def generate(
    source: Source,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]…", help="Default: standard input, as one prompt.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a prompt on each line; - for standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="New tokens of a text, at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="0 takes the likeliest token; above 0, tokens are sampled.")
    ] = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    stop_token: StopToken = None,
    seed: Seed = None,
    n: Annotated[int, typer.Option(min=1, metavar="N", help="Texts for each prompt.")] = 1,
    beams: Annotated[int, typer.Option(min=1, metavar="N", help="Search for the likeliest text with N beams.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(metavar="X", help="With --beams: 0 compares sums of log-probabilities, 1 their means.")
    ] = 1.0,
    log_probabilities: Annotated[
        bool, typer.Option("--log-probabilities", help="With --json: the log-probability of every token.")
    ] = False,
    alternatives: Annotated[
        int, typer.Option(min=0, metavar="K", help="With --json: the K likeliest tokens of every step.")
    ] = 0,
    weights: Weights = None,
    state: StateStorage = None,
    mechanism: MechanismName = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the checkpoint's chat template as a user's message.")
    ] = False,
    show_cost: Annotated[
        bool, typer.Option("--show-cost", help="Show FLOPs, bytes and KV cache per token, predicted and measured.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line for each text.")] = False,
) -> None:
    """Continue texts. A single text is printed token by token, several as they finish; Ctrl-C keeps the part so far."""
    chosen = plan(locals())
    check_counts(n, beams, length_penalty, chosen.sampling, alternatives)
    if log_probabilities and not as_json:
        raise ValueError("log_probabilities: expected --json, which prints them, got none")
    if alternatives and not as_json:
        raise ValueError("alternatives: expected --json, which prints them, got none")
    texts = _texts(prompts, file)
    several = len(texts) * n > 1
    if show_cost and (several or beams > 1):
        raise ValueError("show_cost: expected one prompt, --n 1 and --beams 1, got more, which share their steps")

    model = chosen.load()
    decoder = expect(rg.Decoder, model, "show_cost") if show_cost else None
    prompt_tokens = [_tokens(model, text, chat) for text in texts]
    for tokens in prompt_tokens:
        rg.stream(model, tokens, **chosen.stream)  # checks the tokens; the model runs when the stream is read

    # Draw seeds here, so that --json can print them: the same seed gives the same texts again.
    seeds = [secrets.randbits(32) if seed is None and temperature else seed for _ in texts]
    spelled = partial(_spelled, model)
    show = partial(_show, as_json=as_json, several=several, scored=log_probabilities, spelled=spelled)
    kept: dict[str, Any] = {"log_probabilities": log_probabilities, "alternatives": alternatives}
    if beams > 1:
        options = {**chosen.stream, "beams": beams, "length_penalty": length_penalty, "n": n}
        for text, tokens, text_seed in zip(texts, prompt_tokens, seeds, strict=True):
            for generated in rg.generate(model, [tokens], **options):
                show(text, text_seed, generated)
    elif several:
        size = max(1, TOGETHER // n)
        for start in range(0, len(texts), size):
            part = slice(start, start + size)
            labels = [label for label in zip(texts[part], seeds[part], strict=True) for _ in range(n)]
            growth, rows = _begin(model, prompt_tokens[part], seeds[part], n, **kept, **chosen.stream)
            _show_as_they_finish(growth, rows, [partial(show, *label) for label in labels])
    else:
        begun = perf_counter()
        growth, [row] = _begin(model, prompt_tokens, seeds, 1, **kept, **chosen.stream)
        show_text = partial(show, texts[0], seeds[0]) if as_json else None
        first, last = _write_as_it_comes(growth, row, show_text)
        cost = None
        if decoder is not None:
            cost = _cost(
                decoder, prompt_tokens[0], row.writer.tokens, chosen.stream["storage"], first - begun, last - first
            )
        if show_text is not None:
            show_text(row.result(), cost)
        elif cost is not None:
            _print_cost(cost)


def _texts(prompts: Sequence[str] | None, file: Path | None) -> list[str]:
    if prompts and file is not None:
        raise ValueError("prompt: expected prompts or --file, got both")
    if prompts:
        texts, place = list(prompts), "prompt"
    elif file is not None:
        text = read_text("prompt", file)
        texts, place = text.replace("\r\n", "\n").removesuffix("\n").split("\n"), "line"
    elif sys.stdin.isatty():
        raise ValueError(
            'prompt: expected a text to continue, as in regard generate MODEL "Once", or --file FILE, got none'
        )
    else:
        texts, place = [read_text("prompt", Path("-")).removesuffix("\n")], "prompt"
    for number, text in enumerate(texts, start=1):
        if not text:
            raise ValueError(f"prompt: expected text, got an empty {place}{f' {number}' if len(texts) > 1 else ''}")
    return texts


def _tokens(model: "Model", text: str, chat: bool) -> list[int]:
    if model.tokenizer is None:
        raise ValueError("model: expected a checkpoint with a tokenizer, got one without")
    if not chat:
        return model.tokenizer.encode(text)
    return model.tokenizer.encode(model.tokenizer.chat([{"role": "user", "content": text}]), special=False)


def _begin(
    model: "Model",
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int | None],
    n: int,
    *,
    log_probabilities: bool,
    alternatives: int,
    max_new_tokens: int,
    stop: Sequence[str | int],
    storage: torch.dtype | None,
    **sampling: Any,
) -> tuple[Growth, list[Row]]:
    """Start the engine of `rg.generate`, so that the caller can print its rows while they grow."""
    generator = as_generative(model)
    return begin(
        generator,
        [tuple(tokens) for tokens in prompts],
        sampling=Sampling(**sampling),
        limits=limits_of(generator, max_new_tokens, stop),
        seeds=seeds_of([seed or 0 for seed in seeds], len(prompts), n),
        log_probabilities=log_probabilities,
        alternatives=alternatives,
        storage=storage,
    )


def _write_as_it_comes(growth: Growth, row: Row, show: Callable[..., None] | None) -> tuple[float, float]:
    """Print a text piece by piece, or nothing if `show` will print it. Returns the times of first and last token."""
    first, written = 0.0, 0
    try:
        for _ in growth:
            first = first or perf_counter()
            if show is None and row.piece:
                written += len(row.piece)
                sys.stdout.write(row.piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if show is None:
            print(row.writer.text[written:], flush=True)
        else:
            show(row.result())
        raise
    last = perf_counter()
    if show is None:
        print(flush=True)
    return first, last


def _show_as_they_finish(growth: Growth, rows: Sequence[Row], shows: Sequence[Callable[..., None]]) -> None:
    """Show texts in the order of their prompts, as soon as a text and those before it are finished."""
    shown = 0
    try:
        for _ in growth:
            while shown < len(rows) and rows[shown].reason is not None:
                shown += 1  # before showing: an interrupt in between must not show a text twice
                shows[shown - 1](rows[shown - 1].result())
    except KeyboardInterrupt:
        for row, show in zip(rows[shown:], shows[shown:], strict=True):
            show(row.result())
        raise


def _show(
    text: str,
    seed: int | None,
    generated: rg.Generated,
    cost: dict[str, Any] | None = None,
    *,
    as_json: bool,
    several: bool,
    scored: bool,
    spelled: Callable[[Sequence[tuple[int, float]]], list[dict[str, Any]]],
) -> None:
    if as_json:
        line: dict[str, Any] = {
            "prompt": text,
            "text": str(generated),
            "tokens": generated.tokens,
            "reason": generated.reason,
        }
        line |= {"log_probabilities": generated.log_probabilities if scored else None, "seed": seed}
        if generated.alternatives is not None:
            line["alternatives"] = [spelled(step) for step in generated.alternatives]
        line |= {} if generated.score is None else {"score": generated.score}
        line |= {} if cost is None else {"cost": cost}
        print(json.dumps(line, ensure_ascii=False), flush=True)
        return
    if several and sys.stdout.isatty():
        output().print(Text(text, style="dim"), soft_wrap=True)
    print(generated, flush=True)


def _spelled(model: "Model", step: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """The alternatives of a step with their texts."""
    tokens = [token for token, _ in step]
    texts = [""] * len(step) if model.tokenizer is None else model.tokenizer.tokens(tokens)
    return [
        {"token": token, "text": text, "probability": probability}
        for (token, probability), text in zip(step, texts, strict=True)
    ]


def _cost(
    model: rg.Decoder,
    prompt: Sequence[int],
    new: Sequence[int],
    storage: torch.dtype | None,
    first_seconds: float,
    more_seconds: float,
) -> dict[str, Any]:
    """The cost of the token in the middle of the generated text: predicted by the cost model, counted, and timed."""
    tokens = [*prompt, *new]
    position = max(2, len(prompt) + len(new) // 2)
    flops, state_bytes = _counted(model, tokens[:position], storage)
    summary, weights, attention = (
        model.summary(position),
        _weight_bytes(model),
        _attention_bytes(model, position, storage),
    )
    read, state = weights + attention, summary.state_fixed + position * summary.state_per_token
    if storage is not None:  # only a KV cache can be stored in int8
        layer = model.stack.layers[0].attention
        state = state * _key_bytes(layer, model.dtype, storage) // _key_bytes(layer, model.dtype, None)
    seconds = more_seconds / (len(new) - 1) if len(new) > 1 else None
    return {
        "position": position,
        "predicted": {
            "flops": summary.flops,
            "bytes": read,
            "weight_bytes": weights,
            "attention_bytes": attention,
            "state_bytes": state,
        },
        "measured": {
            "flops": flops,
            "state_bytes": state_bytes,
            "first_token_seconds": first_seconds,
            "token_seconds": seconds,
            "flops_per_second": flops / seconds if seconds else None,
            "bytes_per_second": read / seconds if seconds else None,
        },
    }


@torch.inference_mode()
def _counted(model: rg.Decoder, tokens: Sequence[int], storage: torch.dtype | None) -> tuple[int, int]:
    """FLOPs of the last token's decode step, and bytes of a state with room for just these tokens."""
    from torch.utils.flop_counter import FlopCounterMode

    before = rg.prefill(model, [tokens[:-1]], room=1, storage=storage)
    with FlopCounterMode(display=False) as counter:
        _, state = model.extend(torch.tensor([tokens[-1:]], device=model.device), before.state)
    return counter.get_total_flops(), state.nbytes


def _key_bytes(layer: rg.MultiHeadAttention, dtype: torch.dtype, storage: torch.dtype | None) -> int:
    """Bytes of a token's keys and values in the KV cache; each int8 vector has a scale, in float32 or better."""
    lengths, scale = layer.qk_length + layer.value_length, accumulator(dtype).itemsize
    return layer.num_kv_heads * (lengths * dtype.itemsize if storage is None else lengths + 2 * scale)


def _attention_bytes(model: rg.Decoder, position: int, storage: torch.dtype | None) -> int:
    """Bytes that attention reads and writes, in all layers, for a token at `position`."""
    total = 0
    for block, window in zip(model.stack.layers, model.stack.windows, strict=True):
        layer = block.attention
        work = rg.Work(
            query_length=1,
            key_length=position,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            qk_length=layer.qk_length,
            value_length=layer.value_length,
            dtype=model.dtype,
            mask=rg.causal if window is None else rg.causal & window,
        )
        total += rg.cost(layer.mechanism, work).bytes
        if storage is not None:
            less = _key_bytes(layer, model.dtype, None) - _key_bytes(layer, model.dtype, storage)
            total -= work.keys_read * less
    return total


def _weight_bytes(model: rg.Decoder) -> int:
    """Bytes of weights, and of scales of int8 weights, that a step reads: all, but only one row of each embedding."""
    tables = [*([] if model.config.tied else ["embedding.weight"]), "positions.weight"]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return sum((x[:1] if name in tables else x).numel() * x.element_size() for name, x in tensors.items())


def _print_cost(cost: dict[str, Any]) -> None:
    """Print the cost as a table on standard error; standard output has the text."""
    predicted, measured = cost["predicted"], cost["measured"]

    def row(name: str, first: str, second: str) -> dict[str, str]:
        return {"per new token": name, "predicted": first, "measured": second}

    rows = [
        row("FLOPs", human(predicted["flops"]), human(measured["flops"])),
        row("bytes read", human(predicted["bytes"], "B"), ""),
        row("  weights", human(predicted["weight_bytes"], "B"), ""),
        row("  attention", human(predicted["attention_bytes"], "B"), ""),
        row("state", human(predicted["state_bytes"], "B"), human(measured["state_bytes"], "B")),
        row("state / tokens", *(human(side["state_bytes"] / cost["position"], "B") for side in (predicted, measured))),
        row("time to first token", "", f"{digits(1000 * measured['first_token_seconds'])} ms"),
    ]
    if measured["token_seconds"] is not None:
        rows += [
            row("time per token after", "", f"{digits(1000 * measured['token_seconds'])} ms"),
            row("FLOPs / time", "", human(measured["flops_per_second"], "FLOP/s")),
            row("predicted bytes / time", "", human(measured["bytes_per_second"], "B/s")),
        ]
    with redirect_stdout(sys.stderr):
        print(f"\nFLOPs, bytes and state at token {cost['position']:,}, in the middle of the generated text:")
        print_table(rows, right=("predicted", "measured"))
