"""Makes forgetting.safetensors: what flash-linear-attention's naive forms give, for tests/test_recurrent.py.

    python tests/data/forgetting.py FOLDER    # a folder that holds flash-linear-attention's package `fla`

The naive forms compute in float32; here the same source text computes in float64.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

B, T, H, K, V = 1, 70, 2, 3, 2


def naive(folder: Path, name: str) -> dict:
    source = (folder / "fla" / "ops" / name / "naive.py").read_text()
    for old, new in ((".float()", ".double()"), ("torch.float32", "torch.float64"), ("torch.float)", "torch.float64)")):
        source = source.replace(old, new)
    namespace: dict = {}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def main() -> None:
    folder, generator = Path(sys.argv[1]), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V)
    by_feature, by_head = (
        torch.nn.functional.logsigmoid(draw(B, T, H, K)),
        torch.nn.functional.logsigmoid(draw(B, T, H)),
    )
    heads = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    simple = naive(folder, "simple_gla")
    outputs = {
        "retention": naive(folder, "retention")["naive_retention"](*heads),
        "gla": naive(folder, "gla")["naive_recurrent_gla"](q, k, v, by_feature)[0].transpose(1, 2),
        "simple_gla": simple["naive_recurrent_simple_gla"](q, k, v, by_head)[0].transpose(1, 2),
        "simple_gla_chunked": simple["naive_chunk_simple_gla"](q, k, v, by_head)[0].transpose(1, 2),
    }
    directions, rates = torch.nn.functional.normalize(heads[1], dim=-1), torch.sigmoid(draw(B, H, T))
    delta = naive(folder, "delta_rule")["delta_rule_recurrence"]
    outputs["delta_rule"] = delta(heads[0], directions, heads[2], rates)[0]
    tensors = dict(zip("qkv", heads, strict=True)) | outputs
    tensors |= {
        "rates": rates[..., None],
        "by_feature": by_feature.transpose(1, 2),
        "by_head": by_head.transpose(1, 2)[..., None],
    }
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert all(tensor.dtype == torch.float64 for tensor in plain.values())
    save_file(plain, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
