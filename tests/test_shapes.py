"""The annotated shapes are enforced, in a process of their own: bad input elsewhere must meet our errors, not these."""

from processes import finished

ENFORCED = """
from jaxtyping import install_import_hook
install_import_hook("regard", "beartype.beartype")  # to the end: modules are imported when they are asked for
import regard as rg
import torch
torch.set_num_threads(1)
from regard.core.mechanisms import REGISTRY

place = {"masks": ["none", "causal", "padding left", "combined"], "heads": ["GQA"], "dtypes": ["float32"]}
for name, mechanism in REGISTRY.items():
    report = rg.check(mechanism, laws=["weights", "streamed", "paths"], **place, examples=1)
    assert report.ok, str(report)
print("all shapes hold")
weights, values = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 6)
rg.Softmax().mix(weights, values)
"""


TRACED = """
from jaxtyping import install_import_hook
install_import_hook("regard.inference.tracing", "beartype.beartype")
import regard as rg
import torch
torch.set_num_threads(1)

def traced(model, *inputs, keep=("weights", "queries", "keys", "values", "scores", "outputs", "predictions")):
    with torch.no_grad(), rg.trace(model.eval(), keep=keep) as trace:
        model(*inputs)
    for layer in trace.layers:
        layer.flat().contributions()
    trace.top(1, sequence=1)
    return trace

sizes = {"vocabulary_size": 20, "embedding_dim": 16, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
words = torch.randint(20, (2, 5))
traced(rg.Decoder(rg.DecoderConfig(**sizes)), words, rg.padding([5, 3]))
traced(rg.Transformer(rg.TransformerConfig(**sizes)), words, words[:, :3])
stage = {"embedding_dim": (8,), "num_layers": (1,), "num_heads": (2,), "num_groups": (4,), "patch_size": (3,),
         "patch_stride": (2,), "patch_padding": (1,), "norm_first": (False,)}
trace = traced(rg.DaViT(rg.DaViTConfig(**stage, window_size=3, num_classes=3)), torch.randn(2, 3, 16, 20))
print("all shapes hold")
facts = {"index": 0, "name": "", "kind": "self", "mechanism": "", "heads": (0,), "rows": (0,)}
rg.TracedLayer(**facts, keys=trace.layers[0].keys, values=trace.layers[0].keys[0])
"""


def test_traces_keep_their_annotated_shapes_and_a_wrong_one_is_caught():
    done = finished("-c", TRACED)
    assert done.stdout.strip() == "all shapes hold", done.stderr
    assert done.returncode != 0
    assert "TypeCheckError" in done.stderr


def test_every_mechanism_keeps_its_annotated_shapes_and_a_wrong_one_is_caught():
    done = finished("-c", ENFORCED)
    assert done.stdout.strip() == "all shapes hold", done.stderr
    assert done.returncode != 0
    assert "TypeCheckError" in done.stderr
