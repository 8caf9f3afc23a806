"""`regard chat`: what it writes, how it is interrupted, and that no token is read twice."""

import io
import os
import pty
import re
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of processes started here: one thread a worker, as in conftest

import pytest
import torch

import regard as rg
from letters import ENDLESS, TEMPLATE, tiny
from processes import started
from regard.checkpoints import CheckpointError
from regard.inference.generation.conversation import ContextError, Conversation
from test_cli import Inside, entry_point


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(rg.save(tiny(), tmp_path_factory.mktemp("small") / "model"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that does not come to the end of its context."""
    return str(rg.save(tiny(context_length=1 << 16), tmp_path_factory.mktemp("endless") / "model"))


@pytest.fixture(scope="module")
def smollm2() -> rg.Decoder:
    return rg.load("smollm2")


class Counted:
    """How many tokens a model reads, at each call."""

    def __init__(self, model: rg.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        advance = model.advance

        def counted(tokens: torch.Tensor, *rest: Any) -> Any:
            self.calls.append(tokens.shape[1])
            return advance(tokens, *rest)

        monkeypatch.setattr(model, "advance", counted)


def rendered(model: rg.Decoder, *contents: str) -> list[int]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    return model.tokenizer.encode(model.tokenizer.chat(messages), special=False)


def test_a_turn_reads_only_what_is_new(smollm2: rg.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(smollm2, max_new_tokens=24)
    counted = Counted(smollm2, monkeypatch)
    first = "".join(conversation.say("Name a colour, in one word."))
    read = len(rendered(smollm2, "Name a colour, in one word."))
    assert counted.calls[0] == read
    assert set(counted.calls[1:]) == {1}
    met = read + len(counted.calls) - 1

    counted.calls.clear()
    second = conversation.say("Another one.")
    assert counted.calls == []  # as it is iterated over
    pieces = list(second)
    whole = rendered(smollm2, "Name a colour, in one word.", first, "Another one.")
    assert counted.calls[0] == len(whole) - met < 20
    assert set(counted.calls[1:]) == {1}
    assert len(pieces) > 1
    assert "".join(pieces) == rg.generate(smollm2, whole, max_new_tokens=24)[0]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.messages[3]["content"] == second.text == "".join(pieces)


@pytest.mark.parametrize(
    ("changes", "storage"),
    [
        ({}, None),
        ({}, torch.int8),
        ({"end_tokens": (30,)}, None),
        ({"mechanism": "elu"}, None),
        ({"mechanism": "quadratic"}, None),
        ({"window": rg.Window(5)}, None),
        ({"window": rg.Window(5)}, torch.int8),
        ({"positions": "learned"}, None),
    ],
)
def test_a_conversation_is_what_reading_it_anew_gives(changes: dict[str, Any], storage: torch.dtype | None) -> None:
    model = tiny(**changes).double()
    options: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 20, "storage": storage}
    conversation = Conversation(model, seed=2, chunk=7, **options)
    turns: list[str] = []
    for turn, text in enumerate(["hello!", "whoareyou?", "ah.", "x" * 150, "good."]):
        turns.append(text)
        expected = rg.generate(model, rendered(model, *turns), seed=2 + turn, **options)[0]
        turns.append("".join(conversation.say(text)))
        assert turns[-1] == expected
    assert [message["content"] for message in conversation.messages] == turns


def test_an_answer_that_was_left_stays_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    conversation = Conversation(model, system="quiet!", max_new_tokens=30)
    answer = conversation.say("hello!")
    begun = next(answer)
    assert [message["content"] for message in conversation.messages] == ["quiet!", "hello!", begun]
    begun += "".join(next(answer) for _ in range(3))
    assert [message["content"] for message in conversation.messages] == ["quiet!", "hello!", begun]
    conversation.say("neverheard")
    counted = Counted(model, monkeypatch)
    list(conversation.say("goon."))
    assert counted.calls[0] == len(begun[-1:] + "><goon.>|")
    assert [message["content"] for message in conversation.messages][:4] == ["quiet!", "hello!", begun, "goon."]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "quiet!"}]


def test_a_template_that_writes_an_answer_otherwise_is_read_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    model.tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content[:3]")
    conversation = Conversation(model, max_new_tokens=10)
    list(conversation.say("hey"))
    counted = Counted(model, monkeypatch)
    answer = "".join(conversation.say("you"))
    assert counted.calls[0] == 1 + 1 + 3 + 1 + 1  # > where the answer is cut, <you>|
    tokens = rendered(model, "hey", conversation.messages[1]["content"], "you")
    assert answer == rg.generate(model, tokens, max_new_tokens=10)[0]


def test_a_full_context_is_an_error_that_changes_nothing() -> None:
    conversation = Conversation(tiny(context_length=32), max_new_tokens=100)
    answer = conversation.say("a" * 20)
    text = "".join(answer)
    assert answer.result.reason == "context"
    before = conversation.messages
    with pytest.raises(ContextError, match="context: expected fewer than 32 tokens with this message, got"):
        conversation.say("b")
    assert (
        conversation.messages
        == before
        == [
            {"role": "user", "content": "a" * 20},
            {"role": "assistant", "content": text},
        ]
    )
    conversation.reset()
    assert "".join(conversation.say("a" * 20)) == text


def test_what_a_conversation_cannot_begin_with() -> None:
    with pytest.raises(ValueError, match="temperature"):
        Conversation(tiny(), temperature=-1)
    model = tiny()
    model.tokenizer.chat_template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}"
    with pytest.raises(CheckpointError, match="no system here"):
        Conversation(model, system="be good.")


def test_chat_over_a_pipe_is_a_conversation(
    inside: Inside, smollm2: rg.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"temperature": 0.5, "top_p": 0.8, "seed": 4, "max_new_tokens": 12}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n\nAnd you?\n/reset\nHello!\n/quit\nno\n"))
    done = inside("chat", "smollm2", "--system", "You are brief.", *flags)
    conversation = Conversation(smollm2, "You are brief.", **options)
    answers = ["".join(conversation.say(text)) for text in ("Hello!", "And you?")]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(f"{text}\n" for text in (*answers, answers[0]))


def test_chat_says_when_the_context_is_full(inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rg.save(tiny(context_length=32), tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'a' * 20}\nb\n/reset\nhi\n"))
    done = inside("chat", str(model))
    assert done.returncode == 0
    assert [len(line) for line in done.stdout.splitlines()] == [32 - 23, 32 - 5]
    assert re.fullmatch(r"(regard: context: [^\n]*; /reset starts over\n){3}", done.stderr)


def test_an_interrupt_stops_an_answer_and_not_the_chat(endless: str) -> None:
    options = ("--max-new-tokens", ENDLESS, "--temperature", "0")
    with started("-m", "regard", "chat", endless, *options, bufsize=1) as running:
        running.stdin.write("hi\n")
        begun = running.stdout.read(3)
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate("/quit\n")
    assert (running.returncode, errors) == (0, "")
    assert len(begun) == 3
    assert rest.endswith("\n")
    assert len(rest) < int(ENDLESS)


def test_an_interrupt_between_answers_ends_the_chat(small: str) -> None:
    with started("-m", "regard", "chat", small, "--max-new-tokens", "3", bufsize=1) as running:
        running.stdin.write("hi\n")
        assert len(running.stdout.readline()) == 4
        running.send_signal(signal.SIGINT)
        assert running.wait() == 130
        assert running.stderr.read() == "regard: interrupted\n"


def test_at_a_terminal_there_is_a_prompt(small: str) -> None:
    ours, theirs = pty.openpty()
    command = ["-m", "regard", "chat", small, "--seed", "1", "--max-new-tokens", "5"]
    with started(*command, stdin=theirs, stdout=theirs) as running:
        os.close(theirs)  # so that reading fails once the process is gone
        seen = b""
        while not seen.endswith(b"> "):
            seen += os.read(ours, 1)
        os.write(ours, b"hi\n")
        while seen.count(b"> ") < 2:
            seen += os.read(ours, 1)
        os.write(ours, b"\x04")
        assert running.wait() == 0
    os.close(ours)
    answer = "".join(Conversation(rg.load(small), temperature=0.7, top_p=0.9, seed=1, max_new_tokens=5).say("hi"))
    assert answer.encode() in seen
