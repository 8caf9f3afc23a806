"""The annotated shapes are enforced, in a process of their own: bad input elsewhere must meet our errors, not these."""

from processes import finished

ENFORCED = """
from jaxtyping import install_import_hook
install_import_hook("regard", "beartype.beartype")  # to the end: modules are imported when they are asked for
import regard as rg
import torch
torch.set_num_threads(1)
from regard.core.mechanisms import REGISTRY

for name, mechanism in REGISTRY.items():
    report = rg.check(mechanism, laws=["weights", "streamed", "paths"], heads=["GQA"], dtypes=["float32"], examples=1)
    assert report.ok, str(report)
print("all shapes hold")
weights, values = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 6)
rg.Softmax().mix(weights, values)
"""


def test_every_mechanism_keeps_its_annotated_shapes_and_a_wrong_one_is_caught():
    done = finished("-c", ENFORCED)
    assert done.stdout.strip() == "all shapes hold", done.stderr
    assert done.returncode != 0
    assert "TypeCheckError" in done.stderr
