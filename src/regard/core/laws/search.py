"""Drawing cases and shrinking counter-examples, by hypothesis: one cell at a time."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory

from regard.core.calls.call import Call
from regard.core.extras import needed_for
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import Broken, Case, in_dtype
from regard.core.laws.report import Cell
from regard.core.laws.statements import Law
from regard.core.tensors import weighs_tokens

with needed_for("a check of laws"):
    from hypothesis import HealthCheck, Phase, configuration, given, seed, settings
    from hypothesis import strategies as st

Lengths = Sequence[tuple[int, int]]
"""Pairs of qk_length and value_length to draw from."""


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Write no files: hypothesis would cache what it reads of a program's modules in .hypothesis in the working
    directory."""
    before = getattr(configuration, "__hypothesis_home_directory", None)
    with TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(before)


def search(
    law: Law,
    mechanism: Mechanism,
    mask: str,
    heads: str,
    dtype: str,
    examples: int,
    lengths: Lengths,
    device: str = "cpu",
) -> Cell:
    """The outcome of a law in one cell: it holds for all cases that were drawn, or is broken, with the smallest case
    that breaks it."""
    size = lengths[0][0]
    probe = Case(mask, heads, dtype, batch=2, queries=8, keys=8, qk_length=size, value_length=4, seed=0, device=device)
    if not weighs_tokens(mechanism, probe.qk_length):
        probe = replace(probe, value_length=probe.qk_length)
    mechanism = in_dtype(mechanism, probe.kind, None if device == "cpu" else device)
    reason = mechanism.excuses.get(law.name) or _refused(mechanism, probe) or law.excuse(mechanism, probe)
    if reason is not None:
        return Cell(law.name, mask, heads, dtype, "not applicable", reason)
    failing: list[Case] = []
    number = zlib.crc32(f"{law.name} {mask} {heads} {dtype}".encode())
    edge = _edge(law, mechanism, probe, number)
    early: Exception | None = None
    try:
        law.test(mechanism, edge)
    except Exception as error:  # as below
        early = error

    @seed(number)
    @settings(
        max_examples=examples if early is None else 20 * examples,  # broken: look for something smaller
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(_cases(law, mechanism, probe, lengths))
    def hold(case: Case) -> None:
        try:
            law.test(mechanism, case)
        except Exception:
            failing.append(case)
            raise

    try:
        hold()
    except Exception as error:  # any error of a user's mechanism is a counter-example
        if not failing:
            raise
        return _broken(error, failing[-1], law)
    return Cell(law.name, mask, heads, dtype, "held") if early is None else _broken(early, edge, law)


def _broken(error: Exception, case: Case, law: Law) -> Cell:
    message = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
    return Cell(law.name, case.mask, case.heads, case.dtype, "broken", message.split("\n")[0], case)


def _edge(law: Law, mechanism: Mechanism, probe: Case, number: int) -> Case:
    """Cases at the law's lengths, which take turns over the cells, so that every edge case occurs and is not left to
    chance."""
    length = law.lengths[number % len(law.lengths)]
    tokens = weighs_tokens(mechanism, probe.qk_length)
    more = 0 if law.square or not tokens else number % 4
    value_length = 3 if tokens else probe.qk_length
    return replace(probe, queries=length, keys=length + more, value_length=value_length, seed=number % 10**6)


def _cases(law: Law, mechanism: Mechanism, probe: Case, lengths: Lengths) -> st.SearchStrategy[Case]:
    tokens = weighs_tokens(mechanism, lengths[0][0])

    def build(batch: int, queries: int, more: int, pair: tuple[int, int], number: int) -> Case:
        keys = queries if law.square or not tokens else max(0, queries + more)
        value_length = pair[1] if tokens else pair[0]
        drawn = replace(probe, batch=batch, queries=queries, keys=keys, seed=number)
        return replace(drawn, qk_length=pair[0], value_length=value_length)

    return st.builds(
        build,
        batch=st.sampled_from((1, 2, 3, 0)),
        queries=st.sampled_from(law.lengths),
        more=st.sampled_from((0, 3, 40, -2)),
        pair=st.sampled_from(lengths),
        number=st.integers(0, 10**6),
    )


def _refused(mechanism: Mechanism, case: Case) -> str | None:
    q, k, v = case.tensors()
    return mechanism.refuses(Call(mechanism, q, k, v, case.rule()))
