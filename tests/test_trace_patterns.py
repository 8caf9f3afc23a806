"""What follows from a trace: patterns of heads, rollout, value-weighted attention."""

import json
from dataclasses import replace

import pytest
import torch

import regard as rg
from regard.inference.trace import Trace, patterns, rollout, trace, value_weighted, word_ids
from regard.inference.tracing.patterns import PATTERNS, Scoring
from regard.models.layers.attention import MultiHeadAttention
from traced_models import (
    MODELS,
    inputs,
    layer_of,
    stack,
    vit,
)

TOKENS = ["[CLS]", "the", "re", "##gard", "the", "re", "##gard", "[SEP]"]
CAUSAL = rg.causal.draw(8).visible[None, None]


def looking(targets):
    """A head that puts all weight on some keys of each row, and on its last visible key where there are none."""
    weights = torch.zeros(8, 8)
    for row, columns in enumerate(targets):
        weights[row, columns or [row]] = 1 / max(1, len(columns))
    return weights


HEADS = {
    "previous": [[row - 1] if row else [] for row in range(8)],
    "next": [[row + 1] if row < 7 else [] for row in range(8)],
    "first": [[0]] * 8,
    "separator": [[7]] * 8,
    "same word": [[], [], [3], [2], [], [6], [5], []],
    "self": [[row] for row in range(8)],
    "induction": [[], [], [], [], [2], [3], [4], []],
}


@pytest.mark.parametrize(
    ("name", "causal"),
    # Under a causal mask no row but the last sees the next token or the separator.
    [(name, causal) for name in HEADS for causal in (False, True) if not causal or name not in ("next", "separator")],
)
def test_a_head_of_one_pattern_scores_1_on_it(name, causal):
    targets = [[c for c in columns if not causal or c <= row] for row, columns in enumerate(HEADS[name])]
    weights = torch.stack([looking(targets), looking([list(range(row + 1 if causal else 8)) for row in range(8)])])[
        None
    ]
    scored = patterns(Trace([layer_of(weights, visible=CAUSAL if causal else None)], tokens=TOKENS))
    sharp, flat = scored.heads
    assert sharp.score[name] == pytest.approx(1)
    assert sharp.mass[name] == pytest.approx(1)
    for other in PATTERNS:
        if flat.score[other] is not None:
            assert flat.score[other] == pytest.approx(1 if other == "uniform" else 0, abs=1e-6), other
    assert flat.top == "uniform"
    assert flat.label == "diffuse"
    assert sharp.label == name
    assert sharp.score["uniform"] == pytest.approx(0, abs=1e-6) or name in ("same word", "induction")


def test_statistics_of_heads_that_are_known():
    real = torch.ones(1, 8, dtype=torch.bool)
    real[0, :2] = False  # padded on the left: the first real token is the third
    uniform = real.double() / 6
    weights = torch.stack([torch.eye(8).double().roll(-1, 1), uniform.expand(8, 8)])[None]
    weights[..., 2, :] = torch.eye(8).double()[2]  # the first real row sees itself alone
    previous, spread = Trace([layer_of(weights, real=real)]).statistics()
    assert (previous.entropy, previous.distance) == (pytest.approx(0), pytest.approx(5 / 6))
    assert previous.first == pytest.approx(2 / 6)
    assert spread.entropy == pytest.approx(5 / 6 * torch.tensor(6.0).log())
    assert spread.first == pytest.approx((1 + 5 / 6) / 6)


def test_statistics_are_a_short_text_and_a_table_of_all_heads():
    weights = torch.eye(4).expand(1, 24, 4, 4)
    measured = Trace([layer_of(weights)]).statistics()
    assert repr(measured).splitlines()[:3] == [
        "Statistics of 24 heads",
        "layer  head  kind   entropy  first  distance",
        "    0     0  self      0.00   0.25      0.00",
    ]
    assert repr(measured).endswith("… 14 more heads")
    assert measured._repr_html_().count("<tr>") == 1 + 24


def test_signed_weights_have_no_entropy_and_all_their_rows_count():
    weights = torch.tensor([[1.0, 0.0], [-0.75, 0.25]])[None, None]
    (head,) = Trace([layer_of(weights)]).statistics()
    assert head.entropy is None
    assert head.first == pytest.approx((1 - 0.75) / 2)


def test_a_comparison_is_the_share_of_weight_that_moved():
    before = torch.eye(8)[None, None].repeat(2, 3, 1, 1)
    after = before.clone()
    after[:, 1] = 0.75 * before[:, 1] + 0.25 * before[:, 1].roll(1, -1)
    after[:, 2] = before[:, 2].roll(1, -1)
    compared = Trace([layer_of(before)]).compare(Trace([layer_of(after)]))
    assert [head.change for head in compared.heads] == pytest.approx([0, 0.25, 1])
    assert compared.strongest[0].head == 2
    assert "Comparison of 3 heads" in repr(compared)
    with pytest.raises(ValueError, match="other: expected weights"):
        Trace([layer_of(before)]).compare(Trace([layer_of(before[:1])]))
    with pytest.raises(ValueError, match="other: expected a trace of the layers"):
        Trace([layer_of(before)]).compare(Trace())


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
def test_random_heads_have_no_label_but_diffuse(spread):
    generator = torch.Generator().manual_seed(0)
    scores = spread * torch.randn(1, 144, 24, 24, generator=generator)
    words = [f"word{place}" for place in range(22)]
    labelled = patterns(Trace([layer_of(scores.softmax(-1))], tokens=["[CLS]", *words, "[SEP]"]))
    assert {head.label for head in labelled.heads} == {"diffuse" if spread < 5 else None}


RANDOM = {
    "ours": lambda: rg.Decoder(
        rg.DecoderConfig(vocabulary_size=40, embedding_dim=64, num_layers=3, num_heads=8, positions="learned")
    ),
    **{name: MODELS[name] for name in ("gpt2", "bert", "albert", "llama", "qwen2")},
}


@pytest.mark.parametrize("name", RANDOM)
def test_the_heads_of_a_random_model_have_no_label_but_diffuse(name):
    model, ids = RANDOM[name]().eval(), torch.randperm(40)[None, :24]
    words = ["[CLS]", *(f"word{place}" for place in range(22)), "[SEP]"]
    with torch.no_grad(), trace(model, tokens=words) as traced:
        model(ids)
    assert {head.label for head in traced.patterns().heads} <= {"diffuse", None}


def test_a_mixture_of_a_pattern_and_uniform_scores_its_parts():
    weights = 0.3 * looking(HEADS["self"]) + 0.7 / 8
    head = patterns(Trace([layer_of(weights[None, None])])).of(0, 0)
    assert head.score["self"] == pytest.approx(0.3)
    assert head.score["uniform"] == pytest.approx(0.7)
    assert head.score["separator"] is head.score["same word"] is head.score["induction"] is None


def test_induction_on_a_repeated_sequence():
    tokens = list("abcdabcd")
    weights = torch.zeros(8, 8)
    for row in range(8):
        weights[row, row - 3 if row > 3 else 0] = 1
    head = patterns(Trace([layer_of(weights[None, None], visible=CAUSAL)], tokens=tokens)).of(0, 0)
    assert head.score["induction"] == pytest.approx(1)
    assert head.top == "induction"
    assert head.baseline["induction"] == pytest.approx(sum(1 / n for n in (5, 6, 7, 8)) / 4)
    assert head.label == "induction"


def test_a_single_repeated_word_is_no_induction_head():
    weights = torch.full((8, 8), 0.125)
    weights[6] = torch.eye(8)[2]  # "the" looks at what followed "the"
    tokens = ["a", "the", "cat", "saw", "dogs", "and", "the", "mouse"]
    head = patterns(Trace([layer_of(weights[None, None])], tokens=tokens)).of(0, 0)
    assert (head.rows["induction"], head.score["induction"]) == (1, pytest.approx(1))
    assert head.label == "diffuse"


@pytest.mark.parametrize("rows", [(2, 3), (4, 7), (7,)])
def test_chosen_rows_are_scored_as_those_rows_of_all(rows):
    """The last row need not be among them: tokens are still those of the whole sequence."""
    weights = looking(HEADS["previous"])[None, None]
    layer = replace(layer_of(weights[:, :, rows, :]), rows=rows)
    head = patterns(Trace([layer], tokens=TOKENS)).of(0, 0)
    assert (head.label, head.score["previous"]) == (("previous", 1.0) if len(rows) > 1 else (None, 1.0))
    with pytest.raises(ValueError, match=r"tokens: expected 1 sequences of 8 strings, got lengths \[3\]"):
        patterns(Trace([layer], tokens=TOKENS[:3]))


def test_the_baseline_is_of_the_visible_keys_and_padding_is_left_out():
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1, :3] = False  # padded on the left
    visible = CAUSAL & real[:, None, None]
    weights = visible / visible.sum(-1, keepdim=True).clamp(min=1)
    weights[1, 0, 3:, 3:] = torch.eye(5)
    weights[1, 0, 4:] = 0
    weights[1, 0, 4:, 3] = 1  # the first real token
    weights[0, 0] = weights[0, 0] * 0 + torch.eye(8)[0]
    head = patterns(Trace([layer_of(weights, visible=visible, real=real)])).of(0, 0)
    assert head.score["first"] == pytest.approx(1)
    first = [1 / n for n in range(2, 9)] + [1 / n for n in range(2, 6)]  # rows that see the first token and more
    assert head.baseline["first"] == pytest.approx(sum(first) / len(first))


def test_patterns_of_cross_attention_and_of_patches():
    source, target = ["▁chat", "▁noir", "</s>"], ["▁noir", "▁cat"]
    weights = torch.tensor([[0.0, 1, 0], [0, 0, 1]])[None, None]
    head = patterns(Trace([layer_of(weights, kind="cross")], tokens=target, source_tokens=source)).of(0, 0)
    assert head.score["same word"] == pytest.approx(1)
    ended = torch.cat([weights, torch.tensor([0.0, 0, 1]).expand(1, 1, 1, 3)], 2)  # </s> to </s>: not the same word
    trace_of_ended = Trace([layer_of(ended, kind="cross")], tokens=[*target, "</s>"], source_tokens=source)
    assert patterns(trace_of_ended).of(0, 0).rows["same word"] == head.rows["same word"] == 1
    assert head.score["separator"] == pytest.approx((0.5 - 1 / 3) / (1 - 1 / 3))
    assert [name for name in PATTERNS if head.score[name] is None] == ["previous", "next", "self", "induction"]
    model = vit().eval()
    with trace(model) as traced:
        model(torch.randn(1, 3, 16, 16))
    patches = traced.patterns()
    assert {name for name, score in patches.heads[0].score.items() if score is None} == {
        "separator",
        "same word",
        "induction",
    }
    assert patches.heads[0].baseline["first"] == pytest.approx(1 / 17)


def test_patterns_print_draw_and_go_to_json():
    model = MODELS["bart"]().eval()
    words = [[f"▁{n}" for n in range(9)]] * 2
    with trace(model, tokens=[w[:5] for w in words], source_tokens=words) as traced:
        model(**inputs("bart"))
    scored = traced.patterns(separators=["▁8"])
    assert len(str(scored).splitlines()) == 1 + 6 * 4
    assert len(json.loads(json.dumps(scored.to_dict()))["heads"]) == 24
    assert scored.plot().axes
    assert traced.patterns(separators=[-1]).of(1, 0).score["separator"] is not None
    with pytest.raises(ValueError, match="separators: expected positions below"):
        traced.patterns(separators=[20])
    with pytest.raises(ValueError, match=r"tokens: expected 2 sequences of 5 strings, got lengths \[3\]"):
        traced.label(["a", "b", "c"], words).patterns()
    with pytest.raises(ValueError, match="head: expected a recorded layer and head, got layer 9 head 0"):
        scored.of(9, 0)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["[CLS]", "un", "##like", "##ly", "!", "[SEP]"], [None, 0, 0, 0, 1, None]),
        (["Hel", "lo", ",", "Ġwor", "ld", "<|endoftext|>"], [0, 0, 1, 2, 2, None]),
        (["<s>", "▁Hel", "lo", "▁", "you", "</s>"], [None, 0, 0, 1, 2, None]),
        (["<|startoftext|>", "hel", "lo</w>", "you</w>"], [None, 0, 0, 1]),
        (["C", "C", "(", "=", "O", ")"], [0, 1, 2, 3, 4, 5]),
        ([], []),
    ],
)
def test_words_of_tokens(tokens, words):
    assert word_ids(tokens) == words


def test_rollout_is_the_product_of_mixed_layers():
    model, x = stack(rg.Quadratic(), layers=3, causal=False), torch.randn(2, 6, 16)
    with trace(model) as traced:
        model(x)
    flow = rollout(traced)
    assert torch.allclose(flow.sum(-1), torch.ones(2, 6), atol=1e-6)
    expected = torch.eye(6).expand(2, 6, 6)
    for layer in traced.layers:
        expected = (0.5 * layer.weights.mean(1) + 0.5 * torch.eye(6)) @ expected
    assert torch.allclose(flow, expected, atol=1e-6)
    assert torch.equal(traced.rollout(), flow)


def test_rollout_wants_one_stack():
    model = MODELS["bart"]().eval()
    with trace(model) as traced:
        model(**inputs("bart"))
    with pytest.raises(ValueError, match=r"trace: expected self-attention of one stack"):
        rollout(traced)
    assert rollout(traced.select(kind="self", name="encoder")).shape == (2, 9, 9)
    with pytest.raises(ValueError, match="trace: expected at least one layer"):
        rollout(Trace())


def test_value_weighted_attention_is_the_norm_of_weighted_values():
    layer, x = MultiHeadAttention(16, 4, num_kv_heads=2, value_length=3), torch.randn(2, 5, 16)
    with trace(layer) as traced:
        layer(x, mask=rg.causal)
    recorded = traced.layers[0]
    plain, projected = value_weighted(recorded), traced.value_weighted(0, layer.W_o.weight)
    for b, h, t, s in [(0, 0, 4, 1), (1, 3, 2, 2), (1, 1, 3, 0), (0, 2, 1, 3)]:
        value = recorded.weights[b, h, t, s] * recorded.values[b, h // 2, s]
        assert plain[b, h, t, s] == pytest.approx(value.norm().item(), abs=1e-6)
        through = layer.W_o.weight[:, 3 * h : 3 * h + 3] @ value
        assert projected[b, h, t, s] == pytest.approx(through.norm().item(), abs=1e-6)
    with pytest.raises(ValueError, match=r"projection: expected \(E, H · 3\)"):
        value_weighted(recorded, torch.randn(16, 7))


def test_heads_computed_in_parts_are_those_computed_at_once(monkeypatch):
    torch.manual_seed(0)
    mask = torch.rand(1, 5, 8, 8) < 0.7
    mask[..., 0] = True
    weights = torch.randn(1, 5, 8, 8).masked_fill(~mask, -torch.inf).softmax(-1)
    recorded = [Trace([layer_of(weights, visible=visible)], tokens=TOKENS) for visible in (mask, None)]
    whole = [(trace.patterns(), trace.statistics()) for trace in recorded]
    monkeypatch.setattr("regard.inference.tracing.statistics.PART_BYTES", 2 * weights[0, 0].nbytes)
    assert [(trace.patterns(), trace.statistics()) for trace in recorded] == whole
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
    assert [head.entropy for head in whole[0][1]] == pytest.approx(entropy.tolist(), abs=1e-6)


def test_layers_share_targets_only_if_their_masks_positions_and_tokens_agree():
    torch.manual_seed(0)
    masks = [None, CAUSAL, CAUSAL.clone(), torch.stack([CAUSAL[0, 0], torch.ones(8, 8, dtype=torch.bool)])[None]]
    real = torch.tensor([[True] * 6 + [False] * 2])
    layers = []
    for index, (visible, padding) in enumerate([*((mask, None) for mask in masks), (None, real), (CAUSAL, real)]):
        shown = torch.ones(1, 2, 8, 8, dtype=torch.bool) if visible is None else visible.expand(1, 2, 8, 8)
        shown = shown if padding is None else shown & padding[:, None, None]
        weights = torch.randn(1, 2, 8, 8).masked_fill(~shown, -torch.inf).softmax(-1)
        layers.append(layer_of(weights, visible=shown if padding is not None else visible, index=index, real=padding))
    scoring = Scoring(Trace(layers, tokens=TOKENS))
    for layer in layers:
        assert scoring.heads(layer) == list(patterns(Trace([layer], tokens=TOKENS)).heads)
    assert len(scoring._targets) == len(layers) - 1
