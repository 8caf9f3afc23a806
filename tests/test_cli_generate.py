"""`regard generate`: what it writes, and how it is interrupted."""

import io
import json
import os
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
from letters import ENDLESS, LETTERS, tiny
from processes import finished, started
from test_cli import Inside, entry_point

FRANCE = "The capital of France is"


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
