"""Fine-tuning for conversations: which tokens are answers, one command from a checkpoint to a model that chats."""

import json
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

import regard as rg
from forked import forks
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.gguf_file import open_gguf
from regard.checkpoints.names import NAMES
from regard.models.layers.lora import lora_of
from regard.training.data.chats import ChatTokens, chats, tokens_of, written
from regard.training.data.vocabulary import train_bpe
from regard.training.metrics import read_metrics
from regard.training.recipes.started import started
from regard.training.task import IGNORED

TURNS = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "  Who, really?"},
    {"role": "assistant", "content": " You: né\n\nà Łódź 🙂  "},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LATER = CHATML.replace(
    "m['content'] + '<|im_end|>' }}", "(m['content'] if loop.last else m['content']|trim) + '<|im_end|>' }}"
)
PREFILLED = CHATML.replace("<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>assistant\n<think>' }}{% endif %}")


@pytest.fixture(scope="module")
def tokenizer():
    """SmolLM2's, if it is installed."""
    path = NAMES["smollm2"].find()
    if path is None:
        pytest.skip(NAMES["smollm2"].command)
    return rg.Tokenizer.from_gguf(open_gguf(path).metadata)


@pytest.fixture
def templated(tokenizer):
    before = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = before


def learned_text(text, spans, tokenizer):
    ids, learned = tokens_of(text, spans, tokenizer, {tokenizer.eos})
    return ids, learned, tokenizer.decode([i for i, flag in zip(ids, learned, strict=True) if flag], special=True)


def test_answers_are_learned_to_the_end_of_their_turn_after_what_a_chat_gives_the_model(tokenizer):
    [(text, spans)] = written(TURNS, tokenizer)
    assert text == tokenizer.chat(TURNS, add_generation_prompt=False)
    ids, learned, answers = learned_text(text, spans, tokenizer)
    assert ids == tokenizer.encode(text, special=False)
    assert answers == " You: né\n\nà Łódź 🙂  <|im_end|>Because.<|im_end|>"
    for turn in (2, 4):
        prompt = tokenizer.encode(tokenizer.chat(TURNS[:turn]), special=False)
        assert ids[: len(prompt)] == prompt  # bitwise what `regard chat` reads
        assert [learned[len(prompt) - 1], learned[len(prompt)]] == [False, True]


def test_the_learned_tokens_are_those_that_transformers_finds_by_generation_tags(templated, tmp_path):
    transformers = pytest.importorskip("transformers")
    templated.chat_template = CHATML
    templated.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for chat in (TURNS, *chats()[-12:]):
        expected = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        [(text, spans)] = written(chat, templated)
        ids, learned, _ = learned_text(text, spans, templated)
        assert ids == expected["input_ids"]
        assert list(map(int, learned)) == expected["assistant_masks"]


def test_a_token_across_the_beginning_of_an_answer_is_not_learned(tokenizer):
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "\n\nYou."}]
    [(text, spans)] = written(chat, tokenizer)
    ids, learned, answer = learned_text(text, spans, tokenizer)
    assert tokenizer.tokens(ids)[learned.index(True) - 1] == "\n\n"  # of the template and of the answer
    assert answer == "\nYou.<|im_end|>"


def test_a_template_that_writes_earlier_turns_differently_makes_an_example_of_each_answer(templated):
    templated.chat_template = LATER
    texts = written(TURNS, templated)
    answers = [learned_text(*text, templated)[2] for text in texts]
    assert answers == [" You: né\n\nà Łódź 🙂  <|im_end|>", "Because.<|im_end|>"]
    assert "You: né\n\nà Łódź 🙂<|im_end|>" in texts[1][0]


def test_a_template_whose_answers_do_not_follow_its_prompt_is_refused(templated):
    templated.chat_template = PREFILLED
    with pytest.raises(CheckpointError, match="expected answers to follow what begins the assistant's turn"):
        written(TURNS, templated)


def test_rows_are_truncated_and_those_without_an_answer_left_out(tokenizer):
    whole = ChatTokens.of(chats(), tokenizer, 512, {tokenizer.eos})
    size = int(whole.sizes[0])
    batch = whole.batch([0, 5])
    assert batch["tokens"].shape == batch["targets"].shape == (2, int(whole.sizes[[0, 5]].max()))
    kept = batch["targets"][0] != IGNORED
    assert (batch["targets"][0][:-1][kept[:-1]] == batch["tokens"][0][1:][kept[:-1]]).all()
    assert len(ChatTokens.of(chats()[:1], tokenizer, size, {tokenizer.eos}).sizes) == 1
    assert list(ChatTokens.of(chats()[:1], tokenizer, size - 1, {tokenizer.eos}).sizes) == [size - 1]
    assert len(ChatTokens.of(chats()[:1], tokenizer, 9, {tokenizer.eos}).sizes) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model that chats, and data."""
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    tokenizer = train_bpe([message["content"] for chat in chats() for message in chat], 400)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}[END]{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    config = rg.DecoderConfig(
        vocabulary_size=400, embedding_dim=32, num_layers=2, num_heads=2, end_tokens=(2,), start_token=1
    )
    model = rg.Decoder(config)
    model.tokenizer = tokenizer
    rg.save(model, folder / "base")
    return folder


@pytest.fixture(scope="module")
def processes():
    with forks() as parent:
        yield parent


def test_one_command_trains_adapters_that_every_command_reads(processes, folder, tmp_path):
    def regard(*words):
        out = folder / f"{words[0]}-{len(list(folder.iterdir()))}.txt"
        child = processes.regard(words, out, cwd=folder)
        assert child.wait() == 0, child.text
        return child.text

    flags = ["--lora-rank", "4", "--lora-targets", "all", "--steps", "12", "--warmup", "2", "--learning-rate", "0.02"]
    run = ["train", "chat", "--from", "base", "--out", "run", *flags, "--ema", "0.5", "--device", "cpu"]
    text = regard(*run, "--evaluate-every", "12")
    assert "step 12: loss" in text
    base = (folder / "base/model.safetensors").read_bytes()
    assert (folder / "run/data/start/model.safetensors").read_bytes() == base
    assert sorted(path.name for path in (folder / "run/model").iterdir()) == [
        *("adapters.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"),
    ]
    losses = [record["loss"] for record in read_metrics(folder / "run") if "loss" in record]
    assert losses[-1] < losses[0]
    loaded = rg.load(folder / "run")
    assert lora_of(loaded) is None
    chat = loaded.tokenizer.chat([{"role": "user", "content": "Who?"}])
    answer = str(rg.generate(loaded, [loaded.tokenizer.encode(chat, special=False)], max_new_tokens=5)[0])
    assert answer in regard("generate", "run", "--chat", "Who?", "--max-new-tokens", "5").replace("\r", "")
    regard("convert", "run", "merged", "--to", "regard")
    merged = rg.load(folder / "merged")
    assert all(torch.equal(tensor, merged.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    regard("convert", "run", "peft", "--to", "peft")
    config = json.loads((folder / "peft/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 8.0, 14)
    begun = started(rg.Decoder, str(folder / "run"), None, tmp_path).state_dict()
    assert all(torch.equal(tensor, begun[name]) for name, tensor in loaded.state_dict().items())


WRONG = {
    "Hello.": "expected a JSON object, got",
    '{"message": "a"}': "expected messages, a list of objects, got None",
    '{"messages": [{"role": "user", "content": "a"}]}': "expected an answer, a message of the role assistant, got none",
    '[{"role": "user", "content": null}]': "expected messages with a role and a content",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_line_that_is_no_conversation_is_named(line, tmp_path):
    (tmp_path / "own.jsonl").write_text('[{"role": "assistant", "content": "a"}]\n' + line + "\n")
    with pytest.raises(ValueError, match=r"own\.jsonl, line 2: " + re.escape(WRONG[line])):
        chats(tmp_path / "own.jsonl")


REFUSED = {
    "no such file": (["--data", "nothing.jsonl"], "data: expected a file of conversations, got"),
    "a long context": (["--context", "9999"], "--context: expected at most the 2048 of the model"),
    "another model": (["--from", "minilm"], "--from: expected a decoder, got Encoder"),
    "no rank": (
        ["--lora-targets", "query"],
        "--lora-rank: expected one with --lora-alpha and --lora-targets, got none",
    ),
    "another target": (["--lora-rank", "2", "--lora-targets", "querry"], "--lora-targets: expected some of query, key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_learned_is_one_line_and_leaves_nothing(case, processes, folder):
    flags, words = REFUSED[case]
    out = folder / f"{list(REFUSED).index(case)}.txt"
    child = processes.regard(["train", "chat", "--from", "base", "--out", "refused", *flags], out, cwd=folder)
    assert child.wait() == 2, child.text
    [line] = child.text.splitlines()
    assert line.startswith("regard: error: ")
    assert words in line
    assert not [*folder.glob("*refused"), *folder.glob(".refused*")]
