"""Set-up for all tests: numbers are seeded, one thread a worker."""

import os

# Some CPUs advertise matrix tiles they may not use; bfloat16 products then die. Must be set before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
