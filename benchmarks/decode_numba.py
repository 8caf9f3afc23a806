"""A decode step in numba: the same algorithm as src/regard/core/paths/decode_code.py, float32, one query. Run by
compilers.py.

numba has no vector types: LLVM may or may not vectorise these loops. 2^x is computed from its bits, since numba calls
the C library's exp for every number.
"""

import math

import numba
import numpy as np

BLOCK = 96


@numba.njit(parallel=True, cache=True, fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy")
def decode(q, k, v, scale, out):
    """q (H, D), k and v (G, S, D), out (H, D)."""
    groups, keys, length = k.shape
    rows = q.shape[0] // groups
    factor = np.float32(scale * math.log2(math.e))
    for g in numba.prange(groups):
        queries = q[g * rows : (g + 1) * rows] * factor
        sums, tops = np.zeros((rows, length), np.float32), np.full(rows, np.float32(-3e38))
        totals, weights = np.zeros(rows, np.float32), np.empty((rows, BLOCK), np.float32)
        bits = np.empty(BLOCK, np.int32)
        powers = bits.view(np.float32)
        for start in range(0, keys, BLOCK):
            count = min(BLOCK, keys - start)
            for s in range(count):
                for r in range(rows):
                    score = np.float32(0)
                    for d in range(length):
                        score += queries[r, d] * k[g, start + s, d]
                    weights[r, s] = score
            for r in range(rows):
                top = tops[r]
                for s in range(count):
                    top = max(top, weights[r, s])
                fading = np.float32(2) ** (tops[r] - top)
                total = np.float32(0)
                for s in range(count):
                    x = max(weights[r, s] - top, np.float32(-126))
                    near = np.floor(x + np.float32(0.5))
                    bits[s] = (np.int32(near) + 127) << 23
                    weights[r, s] = x - near
                for s in range(count):
                    x = weights[r, s]
                    power = np.float32(1.5403530e-4) * x + np.float32(1.3333558e-3)
                    power = power * x + np.float32(9.6181291e-3)
                    power = power * x + np.float32(5.5504109e-2)
                    power = power * x + np.float32(2.4022651e-1)
                    power = power * x + np.float32(6.9314718e-1)
                    power = (power * x + np.float32(1)) * powers[s]
                    weights[r, s] = power
                    total += power
                tops[r], totals[r] = top, totals[r] * fading + total
                for d in range(length):
                    sums[r, d] *= fading
            for r in range(rows):
                for s in range(count):
                    weight = weights[r, s]
                    for d in range(length):
                        sums[r, d] += weight * v[g, start + s, d]
        for r in range(rows):
            for d in range(length):
                out[g * rows + r, d] = sums[r, d] / totals[r]
