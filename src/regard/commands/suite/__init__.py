"""Speed as ratios: ours and a named peer with the same inputs, interleaved in one run.

Each benchmark first checks that both give the same result and refuses to report a speed otherwise. Then it times ours
and the peer in turn, round after round, and reports the ratio of the medians: above 1, ours is faster. Times depend on
the machine; ratios depend on it less.
"""

import torch

from regard.commands.suite import attention, generation, models, overhead, training
from regard.commands.suite.attention import of_mechanism
from regard.commands.suite.harness import Bench, Result, environment, interleaved, save
from regard.commands.suite.rates import LOOKS, ROUNDS, crossing

__all__ = ["LOOKS", "ROUNDS", "SUITE", "Bench", "Result", "crossing", "environment", "of_mechanism", "run", "save"]

SUITE: dict[str, Bench] = {
    bench.name: bench
    for bench in (*attention.BENCHES, *overhead.BENCHES, *models.BENCHES, *generation.BENCHES, *training.BENCHES)
}


@torch.no_grad()
def run(bench: Bench, quick: bool = False) -> Result:
    """Run one benchmark, of the suite or of `of_mechanism`: check that both agree, then time them in turn."""
    torch.manual_seed(0)
    if bench.special is not None:
        return bench.special(bench)
    assert bench.make is not None
    pair = bench.make()
    first, second = (pair.ours(), pair.peer()) if pair.check is None else pair.check()
    apart = (first - second).abs().max().item()
    if not apart <= pair.tolerance:
        raise ValueError(f"{bench.name}: expected results within {pair.tolerance}, got {apart:.3g}: no speed to report")
    ours, peer = interleaved([pair.ours, pair.peer], 3 if quick else bench.rounds)
    return Result(bench.name, bench.title, bench.peer, bench.goal, peer / ours, ours * 1e3, peer * 1e3)
