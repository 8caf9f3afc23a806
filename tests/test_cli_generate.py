"""`regard generate` and `regard chat`: what they write, how they are interrupted, and that no token is read twice."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of processes started here: one thread a worker, as in conftest

import pytest
import torch

import regard as rg
from processes import finished, started
from regard.checkpoints import CheckpointError, Tokenizer
from regard.inference.generation.conversation import ContextError, Conversation
from test_cli import Inside, entry_point

FRANCE = "The capital of France is"
LETTERS = "abcdefghijklmnopqrstuvwxyz.?!<>|"
TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '|' }}{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}|{% endif %}"
)
ENDLESS = "20000"
"""New tokens, of which some seconds could not give the last."""
SIZES = {"embedding_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


def tiny(**changes: Any) -> rg.Decoder:
    """A random model of letters, with a template: a letter is a token."""
    torch.manual_seed(3)
    model = rg.Decoder(rg.DecoderConfig(vocabulary_size=len(LETTERS), **{**SIZES, **changes})).eval()
    model.initialise(0.3)  # otherwise it says one letter again and again
    model.tokenizer = Tokenizer.from_vocabulary(list(LETTERS), special={})
    model.tokenizer.chat_template = TEMPLATE
    return model


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "prompts.txt").write_text("ab\ncde\nf\n")
    (folder / "gap.txt").write_text("ab\n\nf\n")
    (folder / "nothing.txt").write_text("")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe")
    plain = tiny(context_length=16)
    plain.tokenizer.chat_template = None
    rg.save(plain, folder / "plain")
    plain.tokenizer = None
    rg.save(plain, folder / "wordless")
    return folder


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_prompt_is_what_the_library_gives(inside: Inside, smollm2: rg.Decoder) -> None:
    done = inside("generate", "smollm2", FRANCE, "--max-new-tokens", "8")
    [expected] = rg.generate(smollm2, FRANCE, max_new_tokens=8)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


def test_json_has_all_that_the_library_gives(inside: Inside, small: str) -> None:
    sampling = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5}
    options = [text for name, value in sampling.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    [line] = lines(inside("generate", small, "abc", "--json", "--log-probabilities", "--alternatives", "2", *options))
    model = rg.load(small)
    [expected] = rg.generate(model, "abc", log_probabilities=True, alternatives=2, **sampling)
    assert line == {
        "prompt": "abc",
        "text": expected,
        "tokens": expected.tokens,
        "reason": expected.reason,
        "log_probabilities": expected.log_probabilities,
        "alternatives": [
            [
                {"token": token, "text": model.tokenizer.tokens([token])[0], "probability": probability}
                for token, probability in step
            ]
            for step in expected.alternatives
        ],
        "seed": 5,
    }
    assert len(expected.tokens) > 20


@pytest.mark.parametrize("n", [1, 3])
def test_several_prompts_come_in_their_order_and_as_they_come_alone(inside: Inside, small: str, n: int) -> None:
    # More than grow together, so some wait for others.
    prompts = [LETTERS[at : at + 1 + at % 5] for at in range(20)]
    options = ("--temperature", "1", "--seed", "7", "--max-new-tokens", "12", "--n", str(n))
    model = rg.load(small)
    expected = [
        text for prompt in prompts for text in rg.generate(model, prompt, temperature=1, seed=7, max_new_tokens=12, n=n)
    ]
    assert inside("generate", small, *prompts, *options).stdout == "".join(f"{text}\n" for text in expected)
    answers = lines(inside("generate", small, *prompts, *options, "--json"))
    assert [prompt["prompt"] for prompt in answers] == [prompt for prompt in prompts for _ in range(n)]
    assert [answer["tokens"] for answer in answers] == [text.tokens for text in expected]
    assert {answer["log_probabilities"] for answer in answers} == {None}


def test_beams_are_the_librarys(inside: Inside, small: str) -> None:
    options = {"beams": 3, "n": 2, "length_penalty": 0.5, "max_new_tokens": 6}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    answers = lines(inside("generate", small, "ab", "c", *flags, "--json"))
    model = rg.load(small)
    expected = [text for prompt in ("ab", "c") for text in rg.generate(model, prompt, **options)]
    assert [(answer["text"], answer["score"]) for answer in answers] == [(text, text.score) for text in expected]


def test_stops_end_a_text(inside: Inside, small: str) -> None:
    model = rg.load(small)
    [whole] = rg.generate(model, "abc", max_new_tokens=12)
    [text] = lines(inside("generate", small, "abc", "--max-new-tokens", "12", "--stop", whole[4:6], "--json"))
    assert (text["text"], text["reason"]) == (whole[: whole.index(whole[4:6])], "stop")
    token = whole.tokens[5]
    several = ("--stop-token", str(token), "--stop-token", "0", "--stop", "no such text")
    [text] = lines(inside("generate", small, "abc", "--max-new-tokens", "12", *several, "--json"))
    assert (text["tokens"], text["reason"]) == (whole.tokens[: whole.tokens.index(token) + 1], "stop")


def test_a_seed_that_was_drawn_is_told_and_draws_the_same(inside: Inside, small: str) -> None:
    options = ("--temperature", "1.5", "--max-new-tokens", "20", "--json")
    first, second = lines(inside("generate", small, "ab", "ab", *options))
    assert first["seed"] != second["seed"]
    assert first["tokens"] != second["tokens"]
    assert lines(inside("generate", small, "ab", *options, "--seed", str(second["seed"]))) == [second]
    assert lines(inside("generate", small, "ab", "--json", "--max-new-tokens", "2"))[0]["seed"] is None


def test_prompts_from_standard_input_and_files(
    inside: Inside, small: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def type_in(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    def prompts(*arguments: str) -> list[str]:
        done = inside("generate", small, *arguments, "--max-new-tokens", "2", "--json", cwd=folder)
        return [line["prompt"] for line in lines(done)]

    assert prompts("--file", "prompts.txt") == ["ab", "cde", "f"]
    type_in("x y\r\nz")
    assert prompts("--file", "-") == ["x y", "z"]
    type_in("one\ntwo\n")
    assert prompts() == ["one\ntwo"]


def test_standard_input_of_a_process(small: str) -> None:
    done = finished("-m", "regard", "generate", small, "--max-new-tokens", "5", typed="abc\n")
    [expected] = rg.generate(rg.load(small), "abc", max_new_tokens=5)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


def test_chat_is_a_users_turn(inside: Inside, small: str) -> None:
    model = rg.load(small)
    tokens = model.tokenizer.encode("<hi>|", special=False)
    [expected] = rg.generate(model, tokens, max_new_tokens=9)
    assert inside("generate", small, "hi", "--chat", "--max-new-tokens", "9").stdout == f"{expected}\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_text_stays_as_far_as_it_came(endless: str, as_json: bool) -> None:
    prompts = ["abc", "de"] if as_json else ["abc"]
    texts = rg.generate(rg.load(endless), prompts, max_new_tokens=40)
    # The first of two ends at once, and so tells that they grow.
    options = ["--json", "--stop", texts[0][:3]] if as_json else []
    with started("-m", "regard", "generate", endless, *prompts, "--max-new-tokens", ENDLESS, *options) as running:
        begun = running.stdout.readline() if as_json else running.stdout.read(10)
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate()
        assert (running.returncode, errors) == (130, "regard: interrupted\n")
    if as_json:
        answers = [json.loads(line) for line in (begun + rest).splitlines()]
        assert [answer["reason"] for answer in answers] == ["stop", "interrupted"]
    text = answers[1]["text"] if as_json else (begun + rest).removesuffix("\n")
    assert len(text) > 0
    assert texts[-1].startswith(text) or text.startswith(texts[-1])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--top-p", "0"], "--top-p: "),
        (["x", "--top-k", "0"], "--top-k: "),
        (["x", "--min-p", "2"], "--min-p: "),
        (["x", "--repetition-penalty", "0"], "--repetition-penalty: "),
        (["x", "--n", "0"], "n"),
        (["x", "--beams", "0"], "beams"),
        (["x", "--beams", "2", "--temperature", "1"], "temperature"),
        (["x", "--beams", "2", "--n", "3"], "beams"),
        (["x", "--length-penalty", "inf"], "--length-penalty: "),
        (["x", "--max-new-tokens", "0"], "max-new-tokens"),
        (["x", "--seed", "-1"], "seed"),
        (["x", "--stop", ""], "stop"),
        (["x", "--stop-token", "-1"], "stop"),
        (["x", "--weights", "int4"], "int8"),
        (["x", "--weights", "int8", "--dtype", "bfloat16"], "float32"),
        (["x", "--weights", "int8", "--device", "cuda"], "--device: expected cpu, on which int8 weights compute"),
        (["x", "--device", "cuda:99"], "--device: expected a device of this machine, got 'cuda:99'"),
        (["x", "--state", "int4"], "int8"),
        (["x", "--mechanism", "nosuch"], "softmax"),
        (["x", "--dtype", "int8"], "float32"),
        (["x", "--log-probabilities"], "--json"),
        (["x", "y", "--show-cost"], "--show-cost: "),
        ([""], "empty"),
        (["x", ""], "empty prompt 2"),
        (["--file", "gap.txt"], "empty line 2"),
        (["--file", "nothing.txt"], "empty"),
        (["--file", "bytes.txt"], "UTF-8"),
        (["--file", "absent.txt"], "absent.txt"),
        (["--file", "prompts.txt", "x"], "both"),
    ],
)
def test_a_wrong_option_is_one_line_before_any_model_is_loaded(
    inside: Inside, small: str, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.setattr(rg, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    done = inside("generate", small, *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"regard: error: [^\n]*{re.escape(named)}[^\n]*\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "smolm2", "x"], "did you mean smollm2"),
        (["generate", "plain", "x" * 16], "context"),
        (["generate", "plain", "a", "x" * 16, "--json"], "context"),
        (["generate", "plain", "a", "--stop-token", "999"], "999"),
        (["generate", "plain", "a", "b", "--stop-token", "999"], "999"),
        (["generate", "plain", "a", "--chat"], "chat template"),
        (["generate", "wordless", "a"], "tokenizer"),
        (["generate", "minilm", "a"], "Encoder"),
        (["chat", "plain"], "chat template"),
        (["chat", "wordless"], "tokenizer"),
        (["chat", "minilm"], "Encoder"),
        (["chat", "plain", "--temperature", "nan"], "temperature"),
        (["chat", "smolm2"], "did you mean smollm2"),
    ],
)
def test_a_wrong_model_or_prompt_is_one_line(inside: Inside, folder: Path, arguments: list[str], named: str) -> None:
    done = inside(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"regard: error: [^\n]*{re.escape(named)}[^\n]*\n", done.stderr)


def test_no_prompt_at_a_terminal_is_an_error(inside: Inside, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = inside("generate", small)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"regard: error: prompt: [^\n]*got none\n", done.stderr)


def test_the_cost_predicted_is_the_cost_measured(inside: Inside, smollm2: rg.Decoder) -> None:
    [answer] = lines(inside("generate", "smollm2", FRANCE, "--max-new-tokens", "6", "--show-cost", "--json"))
    cost = answer["cost"]
    position = len(smollm2.tokenizer.encode(FRANCE)) + 3
    assert cost["position"] == position
    predicted, measured = cost["predicted"], cost["measured"]
    assert predicted["flops"] == measured["flops"] == smollm2.summary(position).flops
    assert predicted["state_bytes"] == measured["state_bytes"] == 30 * 2 * 3 * 64 * 4 * position
    assert predicted["weight_bytes"] == sum(4 * parameter.numel() for parameter in smollm2.parameters())
    queries, keys = 2 * 9 * 64 * 4, 2 * 3 * 64 * 4
    assert predicted["attention_bytes"] == 30 * (queries + keys * position)
    assert predicted["bytes"] == predicted["weight_bytes"] + predicted["attention_bytes"]
    assert measured["first_token_seconds"] > 0
    assert measured["bytes_per_second"] == predicted["bytes"] / measured["token_seconds"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mechanism": "quadratic"},
        {"window": rg.Window(4), "window_layers": (1,), "tied": False},
        {"positions": "learned", "context_length": 64},
    ],
)
def test_the_cost_of_other_decoders(inside: Inside, tmp_path: Path, changes: dict[str, Any]) -> None:
    model = rg.save(tiny(**changes), tmp_path / "model")
    [answer] = lines(inside("generate", str(model), "a", "--max-new-tokens", "20", "--show-cost", "--json"))
    predicted, measured = answer["cost"]["predicted"], answer["cost"]["measured"]
    assert predicted["flops"] == measured["flops"]
    assert predicted["state_bytes"] == measured["state_bytes"]


def test_int8_weights_and_state_are_the_librarys_and_cost_less(inside: Inside, smollm2: rg.Decoder) -> None:
    options = ("--weights", "int8", "--state", "int8", "--max-new-tokens", "6", "--show-cost", "--json")
    [answer] = lines(inside("generate", "smollm2", FRANCE, *options))
    small = rg.quantized(smollm2)
    [expected] = rg.generate(small, FRANCE, max_new_tokens=6, storage=torch.int8)
    assert (answer["text"], answer["tokens"]) == (expected, expected.tokens)
    predicted, measured = answer["cost"]["predicted"], answer["cost"]["measured"]
    tensors = [*small.parameters(), *small.buffers()]
    assert predicted["weight_bytes"] == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert predicted["weight_bytes"] < 0.26 * 4 * sum(tensor.numel() for tensor in smollm2.parameters())
    assert predicted["state_bytes"] == measured["state_bytes"] == 30 * 2 * 3 * (64 + 4) * answer["cost"]["position"]
    queries, keys = 2 * 9 * 64 * 4, 2 * 3 * (64 + 4)
    assert predicted["attention_bytes"] == 30 * (queries + keys * answer["cost"]["position"])


def test_an_int8_state_of_sums_is_an_error(inside: Inside, tmp_path: Path) -> None:
    model = rg.save(tiny(mechanism="elu", embedding_dim=128), tmp_path / "model")
    done = inside("generate", str(model), "abc", "--state", "int8")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"regard: error: --state: [^\n]*is no KV cache[^\n]*\n", done.stderr)


def test_the_cost_is_a_table_beside_the_text(inside: Inside, small: str) -> None:
    done = inside("generate", small, "abc", "--max-new-tokens", "9", "--show-cost")
    [expected] = rg.generate(rg.load(small), "abc", max_new_tokens=9)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n")
    assert re.search(r"per new token +predicted +measured", done.stderr)
    flops = re.search(r"FLOPs +(\S+ k) +(\S+ k) ", done.stderr)
    assert flops is not None
    assert flops[1] == flops[2]
    once = inside("generate", small, "abc", "--max-new-tokens", "1", "--show-cost").stderr
    assert "time per token after" not in once


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


def test_at_a_terminal_several_texts_come_with_their_prompts(
    inside: Inside, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", small, "abc", "de", "--max-new-tokens", "4")
    texts = inside(*arguments).stdout.splitlines()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    dim = inside(*arguments).stdout
    assert dim == f"\x1b[2mabc\x1b[0m\n{texts[0]}\n\x1b[2mde\x1b[0m\n{texts[1]}\n"
    assert "\x1b" not in inside(*arguments[:3], "--max-new-tokens", "4").stdout
