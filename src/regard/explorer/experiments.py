"""What takes more than one pass: every head silenced once, and text that is generated token by token."""

from collections.abc import Callable, Sequence

import torch

from regard.explorer.changes import changed
from regard.explorer.frames import frame
from regard.explorer.layers import no_check
from regard.explorer.limits import check_size
from regard.explorer.snapshot import Snapshot, likeliest
from regard.explorer.subject import Subject, of_ids, output_names
from regard.inference.effects import effects
from regard.inference.generation.prompt import CHUNK
from regard.inference.generation.request import as_generative, limits_of
from regard.models.base import GenerativeModel

Emit = Callable[[bytes], None]
Check = Callable[[], None]


def silence_heads(snapshot: Snapshot, emit: Emit, check: Check = no_check) -> None:
    """Silence every head of a snapshot's model once, with its changes: frames of progress, then the effects."""
    subject = snapshot.subject

    def watch(done: int, total: int) -> None:
        check()
        emit(frame({"type": "progress", "done": done, "total": total}))

    with changed(subject.model, snapshot.changes):
        measured = effects(subject.model, *subject.inputs, watch=watch, **subject.options)
    heads = [
        {
            "layer": effect.layer,
            "head": effect.head,
            "distance": effect.distance,
            "divergence": effect.divergence,
            "top": [{"token": token, "probability": share} for token, share in _named(subject, effect.top)],
        }
        for effect in measured.heads
    ]
    before = [{"token": token, "probability": share} for token, share in _named(subject, measured.top)]
    emit(frame({"type": "effects", "heads": heads, "top": before}))


def _named(subject: Subject, top: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The likeliest tokens; classes have numbers, which become names."""
    if getattr(subject.model, "tokenizer", None) is not None:
        return list(top)
    names = output_names(subject, [int(token) for token, _ in top])
    return [(name, share) for name, (_, share) in zip(names, top, strict=True)]


@torch.no_grad()
def generate_steps(
    snapshot: Snapshot, steps: int, prefix: Sequence[int], emit: Emit, check: Check = no_check
) -> tuple[Subject, int]:
    """Generate greedily after a snapshot's prompt and forced tokens, with its changes: a frame for each new token.

    Gives the unchanged model with the prompt and all new tokens, and the position of the first of them.
    """
    subject = snapshot.subject
    model = _generative(subject)
    prompt = list(subject.tokens.ids)
    source = None if subject.sources is None else list(subject.sources.ids)
    # An encoder-decoder's prompt is its source; what it writes begins after the start token.
    begin = prompt if source is None else prompt[:1]
    wrong = [token for token in prefix if not 0 <= token < model.config.target_size]
    if wrong:
        raise ValueError(f"prefix: expected tokens from 0 to {model.config.target_size - 1}, got {wrong[0]}")
    room = model.room_after(len(source or prompt))
    ends = limits_of(model, 1, None).ends
    new: list[int] = []
    with changed(model, snapshot.changes):
        logits, state = model.read_prompts([source or prompt], room=min(room, steps), chunk=CHUNK, storage=None)
        for index in range(min(steps, room)):
            check()
            forced = index < len(prefix)
            top = likeliest(subject, logits[0])
            token = prefix[index] if forced else top[0]["id"]
            probability = float(logits[0].float().softmax(-1)[token])
            (name,) = output_names(subject, [token])
            step = {"type": "step", "index": index, "token": name, "id": token, "probability": probability}
            emit(frame({**step, "forced": forced, "alternatives": top}))
            new.append(token)
            if token in ends or index + 1 == min(steps, room):
                break
            hidden, state = model.advance(torch.tensor([[token]], device=model.device), state)
            logits = model.predict(hidden)[:, -1]
    # The last token is shown, too, where the context has room for its row.
    whole = of_ids(subject.name, _generative(snapshot.origin), [*begin, *new][: model.context_length], source)
    return check_size(whole), len(begin)


def _generative(subject: Subject) -> GenerativeModel:
    if not isinstance(subject.model, GenerativeModel):
        raise ValueError(f"model: expected one of regard's that generates text, got {subject.name}")
    return as_generative(subject.model)
