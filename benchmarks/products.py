"""Products of a training step's projections in float32, by PyTorch's BLAS and by oneDNN: times, and rounding errors.

    python benchmarks/products.py --out benchmarks/results/products.json

Medians of 30 calls in turn. An error is the largest difference to the float64 product, as a share of that one's largest
number. Where PyTorch's BLAS is Intel's MKL and the processor is not Intel's, MKL leaves AVX-512 unused
(`core.cpu.SLOW_BLAS`).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from regard.commands.suite.harness import environment
from regard.core import cpu
from regard.core.files import write_text
from regard.models.layers.linear import _by_onednn, _weight_gradient

SHAPES = ((1024, 192, 4096), (1024, 192, 192), (1024, 192, 512), (512, 576, 1536), (64, 576, 576), (128, 64, 64))
"""Rows, width and outputs: a decoder's head and projections, SmolLM2's, and two small ones."""
CALLS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the results to this file, with machine and commit")
    options = parser.parse_args()
    rows = []
    for count, width, size in SHAPES:
        x, weight, grad = torch.randn(count, width), torch.randn(size, width), torch.randn(count, size)
        for name, (by_blas, by_onednn, exact) in _products(x, weight, grad).items():
            times: tuple[list[float], list[float]] = ([], [])
            for call in range(CALLS + 2):
                for slot, product in zip(times, (by_blas, by_onednn), strict=True):
                    began = time.perf_counter()
                    product()
                    if call > 1:
                        slot.append(time.perf_counter() - began)
            blas, onednn = map(statistics.median, times)
            rows.append({
                "rows": count, "width": width, "outputs": size, "product": name,
                "BLAS ms": round(1e3 * blas, 4), "oneDNN ms": round(1e3 * onednn, 4), "ratio": round(blas / onednn, 2),
                "BLAS error": _error(by_blas(), exact), "oneDNN error": _error(by_onednn(), exact),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        content = {"environment": environment(), "slow BLAS": cpu.SLOW_BLAS, "products": rows}
        write_text(options.out, json.dumps(content, indent=1) + "\n")


Product = Callable[[], Tensor]


def _products(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, tuple[Product, Product, Tensor]]:
    """By BLAS, by oneDNN, and in float64."""
    return {
        "output": (lambda: x @ weight.t(), lambda: _by_onednn(x, weight), x.double() @ weight.t().double()),
        "for x": (lambda: grad @ weight, lambda: _by_onednn(grad, weight.t()), grad.double() @ weight.double()),
        "for weight": (lambda: grad.t() @ x, lambda: _weight_gradient(grad, x), grad.t().double() @ x.double()),
    }


def _error(product: Tensor, exact: Tensor) -> float:
    return float(f"{(product.double() - exact).abs().max() / exact.abs().max():.2g}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
