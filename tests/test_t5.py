"""T5 computes what transformers' does, and goes there and back."""

import json

import pytest
import torch
from torch import nn

import regard as rg
from encoder_decoders import SIZES, build, close, real, tokens
from regard.checkpoints.forms.t5 import FORM
from regard.checkpoints.huggingface import export
from regard.models.transformer import Transformer, TransformerConfig

VARIANTS = {
    "v1.0": {},
    "odd heads": {"d_kv": 5, "num_heads": 3},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_head": True},
    "tied, not scaled": {"tie_word_embeddings": False},
    "few buckets": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "sixteen buckets": {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 20},
    "deep decoder": {"num_layers": 1, "num_decoder_layers": 3, "feed_forward_proj": "gated-silu"},
    "deep encoder": {"num_layers": 3, "num_decoder_layers": 1, "feed_forward_proj": "gelu"},
}


class TestT5:
    """Against transformers' T5ForConditionalGeneration, in float64."""

    @pytest.fixture(params=VARIANTS)
    def theirs(self, request):
        return self.build(**VARIANTS[request.param])

    def build(self, own_head=False, **changes):
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 60, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(**{**sizes, "decoder_start_token_id": 0, **changes})
        config._attn_implementation = "eager"
        model = transformers.T5ForConditionalGeneration(config).double().eval()
        if own_head:
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "relative" in name:  # else all alike at first, and none could be mistaken
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    def ours(self, theirs, folder):
        theirs.save_pretrained(folder)
        return rg.load(folder)

    @torch.no_grad()
    @pytest.mark.parametrize("side", ["none", "right", "left"])
    def test_logits_are_transformers(self, theirs, tmp_path, side):
        ours = self.ours(theirs, tmp_path)
        source, target = tokens(3, 45), tokens(3, 40)
        if side == "none":
            close(ours(source, target), theirs(input_ids=source, decoder_input_ids=target).logits)
            return
        valid, target_valid = real((3, 45), [45, 13, 30], side), real((3, 40), [31, 40, 9], side)
        expected = theirs(
            input_ids=source,
            attention_mask=valid,
            decoder_input_ids=target,
            decoder_attention_mask=target_valid,
        ).logits
        logits = ours(source, target, rg.padding(valid=valid), rg.padding(valid=target_valid))
        close(logits[target_valid], expected[target_valid])

    @torch.no_grad()
    def test_64_greedy_tokens_are_transformers(self, theirs, tmp_path):
        ours = self.ours(theirs, tmp_path)
        source, valid = tokens(2, 45), real((2, 45), [45, 13], "left")
        theirs.generation_config.eos_token_id = None
        # Their cache has room for as many layers as the encoder's; a deeper decoder runs over it.
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": 64, "use_cache": False}
        expected = theirs.generate(input_ids=source, attention_mask=valid.long(), **options)
        state = ours.start(source, rg.padding(valid=valid), capacity=64)
        chosen = [torch.full((2, 1), ours.config.start_token)]
        for _ in range(64):
            logits, state = ours.extend(chosen[-1], state)
            chosen.append(logits[:, -1:].argmax(-1))
        assert torch.equal(torch.cat(chosen, dim=1), expected)
        assert state.length == 64

    @torch.no_grad()
    def test_transformers_loads_the_export(self, theirs, tmp_path):
        ours = self.ours(theirs, tmp_path)
        folder = rg.save(ours, tmp_path / "again", layout="huggingface")
        again = load_theirs(folder)
        source, target = tokens(2, 30), tokens(2, 20)
        close(again(input_ids=source, decoder_input_ids=target).logits, ours(source, target))
        assert rg.load(folder).config == ours.config

    @torch.no_grad()
    def test_every_head_survives_an_export(self, tmp_path):
        source, target = tokens(2, 12), tokens(2, 9)
        for tied in (True, False):
            for scaled in (True, False):
                ours = build(TransformerConfig.t5(**SIZES, tied=tied, scaled_output=scaled))
                folder = rg.save(ours, tmp_path / f"{tied}-{scaled}", layout="huggingface")
                close(load_theirs(folder)(input_ids=source, decoder_input_ids=target).logits, ours(source, target))
                again = rg.load(folder)
                assert (again.config.tied, again.config.scaled_output) == (tied, scaled)
                close(again(source, target), ours(source, target), 1e-12)

    def test_copies_of_tied_weights_are_left_alone(self, tmp_path):
        from safetensors.torch import save_file

        ours = Transformer(TransformerConfig.t5(**SIZES))
        values, tensors = export(ours)
        names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        copies = {name: tensors["shared.weight"].clone() for name in names}
        extra = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(32, 4)}
        old = {name: value for name, value in values.items() if name != "scale_decoder_outputs"}
        save_file({**tensors, **copies, **extra}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(old))
        loaded = rg.load(tmp_path)
        assert loaded.config.tied
        assert loaded.config.scaled_output
        source, target = tokens(1, 5), tokens(1, 4)
        assert torch.equal(loaded(source, target), ours.eval()(source, target))

    def test_configs_we_cannot_compute_are_refused(self):
        values, tensors = export(Transformer(TransformerConfig.t5(**SIZES)))
        for change in ({"feed_forward_proj": "gated-tanh"}, {"is_encoder_decoder": False}, {"d_kv": "6"}):
            with pytest.raises(rg.CheckpointError, match=next(iter(change))):
                FORM.read_config({**values, **change}, shapes(tensors))

    def test_what_is_not_t5_is_not_written_as_t5(self):
        with pytest.raises(ValueError, match=r"got a model whose .*positions.* cannot be written in a config of t5"):
            export(Transformer(TransformerConfig(**SIZES)))
        changes = [
            {"mechanism": "softmax"},
            {"positions": "none"},
            {"norm": "rms"},
            {"pre_norm": False},
            {"attention_bias": True},
            {"output_bias": True},
            {"network_bias": True},
            {"scaled_embedding": True},
            {"target_vocabulary_size": 50},
            {"num_kv_heads": 2},
            {"value_length": 3},
            {"encoder_window": rg.Window(3, 3)},
            {"activation": "geglu"},
            {"num_layers": 0},
        ]
        for change in changes:
            [name] = change
            lost = {"activation": "feed_forward_proj"}.get(name, name)
            with pytest.raises(ValueError, match=f"form of a Hugging Face model, got .*{lost}"):
                export(Transformer(TransformerConfig.t5(**{**SIZES, **change})))


def shapes(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def load_theirs(folder):
    transformers = pytest.importorskip("transformers")
    options = {"dtype": torch.float64, "attn_implementation": "eager", "output_loading_info": True}
    model, report = transformers.T5ForConditionalGeneration.from_pretrained(folder, **options)
    assert not any(report.values()), report
    return model.eval()
