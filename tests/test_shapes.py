"""The annotated shapes are enforced, in a process of their own: bad input elsewhere must meet our errors, not these."""

import subprocess
import sys

import pytest

ENFORCED = """
from jaxtyping import install_import_hook
with install_import_hook("regard", "beartype.beartype"):
    from regard import *
    import regard as rg
import torch
torch.set_num_threads(1)
from regard.mechanisms import REGISTRY
"""

CHECK_ALL = """
for name, mechanism in REGISTRY.items():
    report = rg.check(mechanism, laws=["weights", "streamed", "paths"], dtypes=["float32"], examples=2)
    assert report.ok, str(report)
print("all shapes hold")
"""

WRONG = """
weights, values = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 6)
rg.Softmax().mix(weights, values)
"""


def enforced(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ENFORCED + code], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_every_mechanism_keeps_its_annotated_shapes():
    done = enforced(CHECK_ALL)
    assert done.stdout.strip() == "all shapes hold", done.stderr


def test_a_wrong_shape_is_caught():
    done = enforced(WRONG)
    assert done.returncode != 0
    assert "TypeCheckError" in done.stderr
