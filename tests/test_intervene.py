"""Interventions: what is asked for changes as a formula says, and nothing else does."""

import pytest
import torch

import regard as rg
from intervened_models import ENDS, THEIRS, bert, builders, decoder, gpt2, llama, run, t5, tokens, transformers
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.inference.interventions.change import ACTIVE
from regard.inference.trace import Trace

CAUSAL = [name for name in REGISTRY if not name.startswith("channel")]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    assert not ACTIVE


def head_outputs(model, ids, layer):
    """What W_o gets in a layer, by head."""
    kept = []
    attention = model.stack.layers[layer].attention
    handle = attention.W_o.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    model(ids)
    handle.remove()
    return attention.split_heads(kept[0], attention.value_length)


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_a_silent_head_is_zero_and_the_others_are_bitwise_unchanged(mechanism):
    model, ids = decoder(mechanism), tokens()
    before = head_outputs(model, ids, 1)
    with rg.intervene(model, layers=[1], heads=[-2], silence=True):
        after = head_outputs(model, ids, 1)
        earlier = head_outputs(model, ids, 0)
    assert (after[:, 2] == 0).all()
    assert (before[:, 2] != 0).any()
    assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
    assert torch.equal(earlier, head_outputs(model, ids, 0))


CHANGES = {
    "silence": {"silence": True},
    "mean": {"mean": True},
    "hide": {"hide": [1]},
    "beta": {"beta": 3.0},
    "mechanism": {"mechanism": "quadratic"},
    "mean of a trace": {"mean": "trace"},
    "weights": {"weights": "trace"},
    "values": {"values": "trace"},
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", ["ours", "gpt2", "llama", "bert"])
def test_what_was_not_asked_for_is_bitwise_unchanged(name, what):
    model, ids = builders()[name](), tokens()
    plain = run(model, ids)
    with rg.trace(model) as other:
        run(model, tokens())
    options = {key: other if value == "trace" else value for key, value in CHANGES[what].items()}
    keep = ("outputs", "weights")
    with rg.trace(model, keep=keep) as before:
        logits = run(model, ids)
    with rg.intervene(model, layers=[1], heads=[2], **options), rg.trace(model, keep=keep) as after:
        assert not torch.equal(run(model, ids), logits)
    for part in keep:
        assert torch.equal(getattr(after.layers[0], part), getattr(before.layers[0], part))
        assert torch.equal(getattr(after.layers[1], part)[:, [0, 1, 3]], getattr(before.layers[1], part)[:, [0, 1, 3]])
    assert not torch.equal(after.layers[1].outputs[:, 2], before.layers[1].outputs[:, 2])
    assert torch.equal(run(model, ids), plain)


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_hidden_keys_are_masked_keys_also_token_by_token(mechanism):
    model, ids = decoder(mechanism), tokens()
    with rg.intervene(model, hide=[1]):
        changed = model(ids)
        state, steps = model.start(batch=2), []
        for place in range(ids.shape[1]):
            logits, state = model.extend(ids[:, place : place + 1], state)
            steps.append(logits)
    attention, x = model.stack.layers[0].attention, torch.randn(2, 7, 32)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[:, 1] = False
    with rg.intervene(attention, hide=[1]):
        hidden = attention(x, mask=rg.causal)
    torch.testing.assert_close(hidden, attention(x, mask=rg.causal & rg.padding(valid=valid)))
    torch.testing.assert_close(torch.cat(steps, 1), changed, atol=2e-5, rtol=1e-4)
    assert not torch.equal(changed[:, 2:], model(ids)[:, 2:])
    assert torch.equal(changed[:, :1], model(ids)[:, :1])


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_another_mechanism_is_what_attend_computes_with_it(mechanism):
    layer, x = rg.MultiHeadAttention(32, 4, num_kv_heads=2).eval(), torch.randn(2, 7, 32)
    with rg.intervene(layer, mechanism=mechanism):
        changed = layer(x, mask=rg.causal)
    out = rg.attend(*layer.project(x), REGISTRY[mechanism], rg.causal)
    torch.testing.assert_close(changed, layer.W_o(layer.combine_heads(out)))


@pytest.mark.parametrize("builder", builders().values(), ids=builders())
def test_the_ends_of_beta_are_uniform_and_argmax(builder):
    model, ids = builder().double(), tokens()
    for beta, mechanism in ((0.0, rg.Uniform()), (float("inf"), rg.Argmax())):
        with rg.intervene(model, beta=beta), rg.trace(model) as by_beta:
            logits = run(model, ids)
        with rg.intervene(model, mechanism=mechanism), rg.trace(model) as by_mechanism:
            expected = run(model, ids)
        torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)
        for layer, reference in zip(by_beta.layers, by_mechanism.layers, strict=True):
            torch.testing.assert_close(layer.weights, reference.weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("what", ["weights", "values"])
@pytest.mark.parametrize("builder", builders().values(), ids=builders())
def test_its_own_trace_patched_in_changes_nothing_and_another_one_does(builder, what):
    model, ids, others = builder().double(), tokens(), tokens()
    before = run(model, ids)
    with rg.trace(model) as same:
        run(model, ids)
    with rg.trace(model) as another:
        run(model, others)
    with rg.intervene(model, **{what: same}):
        torch.testing.assert_close(run(model, ids), before, atol=1e-6, rtol=1e-5)
    with rg.intervene(model, layers=[0], heads=[1], **{what: another}), rg.trace(model) as patched:
        assert not torch.equal(run(model, ids), before)
    if what == "weights":
        assert torch.equal(patched.layers[0].weights[:, 1], another.layers[0].weights[:, 1])
        assert torch.equal(patched.layers[0].weights[:, 0], same.layers[0].weights[:, 0])


@pytest.mark.parametrize("builder", builders().values(), ids=builders())
def test_a_trace_inside_has_the_changed_weights(builder):
    model, ids = builder(), tokens()
    with rg.trace(model) as before:
        run(model, ids)
    with rg.intervene(model, layers=[0], heads=[2], hide=[0]), rg.trace(model) as after:
        run(model, ids)
    assert (after.layers[0].weights[:, 2, :, 0] == 0).all()
    torch.testing.assert_close(after.layers[0].weights[:, 2, 1:].sum(-1), torch.ones(2, 6))
    assert torch.equal(after.layers[0].weights[:, [0, 1, 3]], before.layers[0].weights[:, [0, 1, 3]])


@pytest.mark.parametrize("builder", builders().values(), ids=builders())
def test_nested_changes_of_a_head_add_up(builder):
    model, ids = builder(), tokens()
    with (
        rg.intervene(model, layers=[1], heads=[0, 1], beta=2.0),
        rg.intervene(model, layers=[1], heads=[1], hide=[0]),
        rg.trace(model) as both,
    ):
        run(model, ids)
    with rg.intervene(model, layers=[1], heads=[1], beta=2.0, hide=[0]), rg.trace(model) as at_once:
        run(model, ids)
    torch.testing.assert_close(both.layers[1].weights[:, 1], at_once.layers[1].weights[:, 1])
    assert (both.layers[1].weights[:, 0, :, 0] != 0).any()


@pytest.mark.parametrize("builder", builders().values(), ids=builders())
def test_a_mean_is_one_vector_for_every_token(builder):
    model, ids = builder(), tokens()
    before = run(model, ids)
    with rg.intervene(model, layers=[2], mean=True):
        assert not torch.allclose(run(model, ids), before)
    assert torch.equal(run(model, ids), before)


@pytest.mark.parametrize("builder", builders().values(), ids=builders())
def test_the_mean_of_a_trace_shows_no_token_what_comes_after_it(builder):
    model, ids = builder(), tokens(1)
    with rg.trace(model) as recorded:
        run(model, tokens(3))
    later = ids.clone()
    later[0, -1] = (later[0, -1] + 1) % 40
    with rg.intervene(model, layers=[0], mean=recorded):
        whole, other = run(model, ids), run(model, later)
    if builder is not bert:
        assert torch.equal(whole[:, :-1], other[:, :-1])
    with rg.trace(model) as again, rg.intervene(model, layers=[0], mean=recorded):
        run(model, ids)
    layer = recorded.layers[0]
    values = layer.values.repeat_interleave(4 // layer.values.shape[1], 1)
    outputs = (layer.weights @ values).mean((0, 2))
    assert outputs.shape == (4, values.shape[3])
    assert len(again.layers) == 3


def test_the_mean_of_a_trace_also_serves_token_by_token_and_that_of_a_pass_does_not():
    model, ids = decoder(), tokens()
    with rg.trace(model) as recorded:
        model(tokens(3))
    with rg.intervene(model, layers=[1], mean=recorded):
        whole = model(ids)
        first, state = model.extend(ids[:, :4], model.start(batch=2))
        rest, _ = model.extend(ids[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=2e-5, rtol=1e-4)
    _, state = model.extend(ids[:, :4], model.start(batch=2))
    with (
        pytest.raises(ValueError, match="mean: expected whole passes, or mean=trace"),
        rg.intervene(model, layers=[1], mean=True),
    ):
        model.extend(ids[:, 4:], state)


@pytest.mark.parametrize("mechanism", ["retention", "gated", "delta"])
def test_what_is_always_causal_serves_decoders_and_is_refused_elsewhere(mechanism):
    model, ids = gpt2(), tokens()
    with rg.intervene(model, mechanism=mechanism):
        assert run(model, ids).isfinite().all()
    for encoder in (
        bert(),
        rg.Encoder(rg.EncoderConfig(vocabulary_size=40, embedding_dim=16, num_layers=1, num_heads=2)),
    ):
        with pytest.raises(ValueError, match="causal"), rg.intervene(encoder, mechanism=mechanism):
            encoder(ids)


def test_channels_and_tokens_are_not_exchanged():
    layer, x = rg.MultiHeadAttention(16, 4).eval(), torch.randn(1, 6, 16)
    channels = rg.MultiHeadAttention(16, 4, mechanism="channel").eval()
    with pytest.raises(ValueError, match="between tokens, as the layer has, got Channel"):  # noqa: SIM117
        with rg.intervene(layer, mechanism="channel"):
            layer(x)
    with pytest.raises(ValueError, match="between channels, as the layer has, got Softmax"):  # noqa: SIM117
        with rg.intervene(channels, mechanism="softmax"):
            channels(x)


def test_in_training_a_trace_shows_changed_weights_before_dropout():
    model = llama().train()
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with rg.intervene(model, beta=0.0), rg.trace(model) as trace:
        model(tokens())
    rows = torch.ones(7, 7).tril() / torch.arange(1, 8)[:, None]
    for layer in trace.layers:
        torch.testing.assert_close(layer.weights, rows.expand_as(layer.weights))


def test_a_mean_leaves_padding_out():
    layer, x = rg.MultiHeadAttention(16, 4).eval(), torch.randn(2, 6, 16)
    mask = rg.padding([6, 3])
    changed = x.clone()
    changed[1, 3:] = 100.0
    with rg.intervene(layer, mean=True):
        torch.testing.assert_close(layer(changed, mask=mask)[1, :3], layer(x, mask=mask)[1, :3])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("builder", THEIRS.values(), ids=THEIRS)
def test_a_mean_of_a_hugging_face_model_leaves_padding_out(builder, side):
    model, ids = builder(), tokens()
    mask = torch.ones_like(ids)
    hidden = slice(0, 3) if side == "left" else slice(4, 7)
    mask[1, hidden] = 0
    others = ids.clone()
    others[1, hidden] = (ids[1, hidden] + 5) % 40  # what padding says must not reach the mean
    with rg.intervene(model, layers=[0], mean=True):
        first, second = (model(which, attention_mask=mask).logits for which in (ids, others))
        everything = model(ids).logits
    torch.testing.assert_close(first[mask == 1], second[mask == 1], atol=1e-6, rtol=0)
    assert not torch.allclose(first[0], everything[0], atol=1e-6)


@pytest.mark.parametrize("builder", [gpt2, llama])
def test_a_mean_over_a_continuation_of_a_hugging_face_model_is_refused(builder):
    model, ids = builder(), tokens()
    cache = model(ids[:, :4], use_cache=True).past_key_values
    message = "mean: expected whole passes, or mean=trace"
    with pytest.raises(ValueError, match=message), rg.intervene(model, mean=True):
        model(ids[:, 4:6], past_key_values=cache)


def test_cross_attention_is_never_a_step():
    model, ids = t5(), tokens(1)
    with rg.trace(model) as recorded:
        model(input_ids=ids, decoder_input_ids=ids[:, :1])
    [cross, _] = [layer.index for layer in recorded.layers if layer.kind == "cross"]
    before = model(input_ids=ids, decoder_input_ids=ids[:, :1]).logits
    with rg.intervene(model, layers=[cross], mean=True):
        after = model(input_ids=ids, decoder_input_ids=ids[:, :1]).logits
    torch.testing.assert_close(after, before)  # the mean over one token is that token's output


def windowed():
    return decoder(window=rg.Window(3), context_length=64)


@pytest.mark.parametrize("place", [2, 9, -2])
def test_hidden_positions_are_those_of_the_sequence_also_when_a_window_has_dropped_keys(place):
    model, ids = windowed(), tokens(1, 24)
    state, steps = model.start(batch=1), []
    with rg.intervene(model, layers=[0], hide=[place]):
        for at in range(24):
            logits, state = model.extend(ids[:, at : at + 1], state)
            steps.append(logits)
    assert max(layer.dropped for layer in state.layers) > 8
    if place < 0:  # of each pass: the token before the newest
        valid = torch.ones(24, 24, dtype=torch.bool)
        valid[range(1, 24), range(23)] = False
    else:
        valid = torch.ones(24, 24, dtype=torch.bool)
        valid[:, place] = False
    attention = model.stack.layers[0].attention
    whole = attention.attend.forward

    def masked(q, k, v, mask=None, *rest, **more):
        return whole(q, k, v, mask & rg.dense(valid), *rest, **more)

    attention.attend.forward = masked
    torch.testing.assert_close(torch.cat(steps, 1), model(ids), atol=2e-5, rtol=1e-4)


def test_hidden_positions_of_a_hugging_face_model_with_a_sliding_cache():
    config = transformers.MistralConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, sliding_window=4, **ENDS
    )  # fmt: skip
    model, ids = transformers.MistralForCausalLM(config).eval(), tokens(1, 14)
    with rg.intervene(model, hide=[9]):
        expected = model(ids).logits
        cache, steps = transformers.DynamicCache(config=config), []
        for at in range(14):
            steps.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(expected, model(ids).logits)


def test_a_state_from_a_file_knows_what_its_window_dropped(tmp_path):
    model, ids = windowed(), tokens(1, 24)
    prompt = rg.prefill(model, [ids[0, :12].tolist()], chunk=3)
    saved = prompt.save(tmp_path / "prompt.safetensors")
    again = rg.Prompt.load(saved, model)
    dropped = [layer.dropped for layer in prompt.state.layers]
    assert max(dropped) > 0
    assert [layer.dropped for layer in again.state.layers] == dropped


def test_generation_under_a_change_is_that_of_whole_passes():
    model, ids = decoder(), tokens(1, 5)
    with rg.intervene(model, layers=[0, 1, 2], heads=[0], silence=True):
        written = rg.generate(model, ids.tolist(), max_new_tokens=6)[0].tokens
        expected = ids[0].tolist()
        for _ in range(6):
            expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert list(written[-6:]) == expected[-6:]
    assert list(rg.generate(model, ids.tolist(), max_new_tokens=6)[0].tokens)[-6:] != expected[-6:]


def test_gradients_flow_through_a_change():
    model, ids = decoder(), tokens()
    with torch.enable_grad(), rg.intervene(model, layers=[0], heads=[1], silence=True):
        model(ids).sum().backward()
    grad = model.stack.layers[0].attention.W_v.weight.grad
    assert grad is not None
    assert grad.abs().sum() > 0


def test_cross_attention_is_a_layer_of_its_own():
    config = rg.TransformerConfig(vocabulary_size=30, embedding_dim=16, num_layers=1, num_heads=2)
    model = rg.Transformer(config).eval()
    source, target = torch.randint(3, 30, (1, 6)), torch.randint(3, 30, (1, 4))
    with rg.trace(model) as before:
        model(source, target)
    cross = next(layer.index for layer in before.layers if layer.kind == "cross")
    with rg.intervene(model, layers=[cross], hide=[2]), rg.trace(model) as after:
        model(source, target)
    assert after.layers[cross].weights.shape == (1, 2, 4, 6)
    assert (after.layers[cross].weights[..., 2] == 0).all()


def test_a_bias_by_position_goes_with_softmax_and_refuses_what_takes_none():
    model, ids = t5(), tokens(1)
    with rg.intervene(model, layers=[0], hide=[3]), rg.trace(model) as trace:
        model(input_ids=ids, decoder_input_ids=ids)
    assert (trace.layers[0].weights[..., 3] == 0).all()
    with pytest.raises(ValueError, match="mechanism: expected attention without a bias"):  # noqa: SIM117
        with rg.intervene(model, mechanism="quadratic"):
            model(input_ids=ids, decoder_input_ids=ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected silence, mean, hide, beta, mechanism, weights or values, got none"),
        ({"silence": [2]}, "silence: expected True or False"),
        ({"silence": True, "mean": True}, "mean: expected it without silence"),
        ({"weights": Trace(), "beta": 2.0}, "weights: expected no beta and no mechanism"),
        ({"hide": [99]}, "hide: expected positions of the 7 keys, got 99"),
        ({"beta": -1.0}, "beta: expected a number from 0 to inf"),
        ({"mechanism": "quadradic"}, "mechanism: expected one of"),
        ({"weights": torch.zeros(1)}, "weights: expected a trace, got Tensor"),
        ({"silence": True, "heads": "0"}, "heads: expected a list of whole numbers"),
        ({"silence": True, "layers": [-1]}, "layers: expected a list of whole numbers from 0"),
        ({"silence": True, "heads": [4]}, "heads: expected whole numbers from -4 to 3, got 4"),
        ({"silence": True, "layers": [7]}, "layers: expected some of those that ran, 0 to 2, got .7."),
    ],
)
def test_bad_changes_are_one_clear_error(options, message):
    model = decoder()
    with pytest.raises(ValueError, match=message):  # noqa: SIM117
        with rg.intervene(model, **options):
            model(tokens())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_beta_for_a_mechanism_without_one_is_refused():
    with pytest.raises(ValueError, match="beta: expected layers of softmax, got Quadratic"):  # noqa: SIM117
        with rg.intervene(model := decoder("quadratic"), beta=2.0):
            model(tokens())


def test_a_trace_of_other_sizes_is_refused():
    model = decoder()
    with rg.trace(model) as shorter:
        model(tokens(length=5))
    with pytest.raises(ValueError, match=r"weights: expected \(2, 4, 7, 7\) in layer 0, as this pass has, got"):  # noqa: SIM117
        with rg.intervene(model, weights=shorter):
            model(tokens())


def test_every_mechanism_that_weighs_tokens_is_here():
    assert set(CAUSAL) == {name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8)}
