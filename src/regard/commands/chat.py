"""`regard chat`: a conversation in the terminal, or over a pipe."""

import sys
from contextlib import suppress
from typing import Annotated

import typer

from regard.commands.common import Device
from regard.commands.generate import (
    Dtype,
    MinP,
    RepetitionPenalty,
    Seed,
    Source,
    StateStorage,
    Stop,
    StopToken,
    TopK,
    TopP,
    Weights,
    plan,
)
from regard.commands.models import MechanismName
from regard.inference.generation.conversation import ContextError, Conversation


def chat(
    source: Source,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message. Default: the template's.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="0 always takes the likeliest token; above 0, tokens are sampled.")
    ] = 0.7,
    top_k: TopK = None,
    top_p: TopP = 0.9,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    stop_token: StopToken = None,
    seed: Seed = None,
    weights: Weights = None,
    state: StateStorage = None,
    mechanism: MechanismName = None,
    dtype: Dtype = None,
    device: Device = "cpu",
) -> None:
    """Chat with a model; a line is a message. /reset starts over, /quit or the end of input exits, Ctrl-C interrupts.

    The chat template is the checkpoint's. The KV cache keeps the conversation: a turn processes only its new tokens.
    """
    chosen = plan(locals())
    _talk(Conversation(chosen.load(), system, seed=seed, **chosen.stream))


def _talk(conversation: Conversation) -> None:
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        _use_history()
        print("/reset starts over, /quit exits, Ctrl-C stops an answer.", file=sys.stderr)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt) as ended:
            if terminal:
                print()
            if isinstance(ended, EOFError):
                return
            raise
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
        elif line:
            _turn(conversation, line)


def _turn(conversation: Conversation, text: str) -> None:
    """Print the answer as it is generated; after an interruption, the part before it stays in the conversation."""
    try:
        answer = conversation.say(text)
    except ContextError as full:
        _say_full(str(full))
        return
    try:
        for piece in answer:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    print(flush=True)
    if answer.result.reason == "context":
        _say_full("context: expected room for the whole answer, got an end in the middle of it")


def _say_full(what: str) -> None:
    print(f"regard: {what}; /reset starts over", file=sys.stderr, flush=True)


def _use_history() -> None:
    """Enable arrow keys and earlier lines, if Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401
