"""GGUF files compute what transformers does."""

import gguf as gguf_package
import pytest
import torch
import transformers

import peers
import regard as rg
from regard.checkpoints.huggingface import export


@torch.no_grad()
def test_smollm2_from_gguf_agrees_with_transformers_and_says_paris():
    ours = rg.load("smollm2")
    values, tensors = export(ours)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        None, config=transformers.LlamaConfig(**values), state_dict=tensors, dtype=torch.float64
    )
    texts = ["The capital of France is", "def add(a, b):\n    return", "Once upon a time", "1, 2, 3,"]
    exact = [theirs(torch.tensor([ours.tokenizer.encode(text)])).logits[0] for text in texts]
    padded, mask = ours.tokenizer.batch(texts, side="left")
    together = ours(padded, mask=mask)
    # Half a unit in the last place of the largest logit for each product on the way: how the products are summed, and
    # so how far two processors' float32 results are apart, is the processor's affair.
    products = 7 * ours.config.num_layers + 1
    for row, expected in enumerate(exact):
        allowed = products * torch.finfo(torch.float32).eps / 2 * expected.abs().max()
        assert (together[row, -len(expected) :] - expected).abs().max() <= allowed
    assert ours.tokenizer.decode([int(together[0, -1].argmax())]) == " Paris"
    assert ours.config.end_tokens == (ours.tokenizer.eos,)
    together = ours.double()(padded, mask=mask)
    assert all((together[row, -len(logits) :] - logits).abs().max() <= 1e-10 for row, logits in enumerate(exact))


def write_gguf(path, theirs):
    """A llama of transformers as llama.cpp's converter writes it."""

    def turned(weight, heads):
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    config, state = theirs.config, theirs.state_dict()
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", *(f"t{number}" for number in range(1, config.vocab_size - 1))])
    writer.add_token_merges(["t 1"])
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = {
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in state.items():
        *inside, last = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        ours = f"blk.{inside[1]}.{parts[last]}" if inside else names[last]
        count = heads.get(ours.rpartition(".")[2])
        tensor = tensor if count is None else turned(tensor, count)
        writer.add_tensor(f"{ours}.weight", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (3, 3)])
@torch.no_grad()
def test_gguf_rows_are_put_back_by_the_number_of_key_value_heads(heads, tmp_path):  # transformers#31788
    counts = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    values = peers.LLAMA | counts | {"hidden_size": 24, "head_dim": 8, "num_hidden_layers": 2}
    theirs = peers.build("LlamaForCausalLM", "LlamaConfig", values).float()
    ours = rg.load(write_gguf(tmp_path / "model.gguf", theirs), dtype=torch.float64)
    tokens = peers.sequences(2, 20)
    assert (ours(tokens) - theirs.double()(tokens).logits).abs().max() <= 1e-10
