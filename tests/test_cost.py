"""The cost model against counters: FLOPs, bytes, state and activation memory."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from broken import Averages
from memory import Allocations, Traffic, saved_bytes
from regard.core.cost.counting import COUNTED, _WithoutNumbers
from regard.core.families.features import RECENT
from regard.core.mechanisms import REGISTRY
from regard.core.paths import sums_cost
from regard.core.paths.sums import steps

GROUPS = {"MHA": 4, "GQA": 2, "MQA": 1}
LINEAR = [rg.Quadratic(), rg.Polynomial(degree=4), rg.Elu(), rg.Taylor(), rg.RandomFeatures(n=16)]


def make(length, groups=4, size=8, dtype=torch.float32, keys=None):
    keys = length if keys is None else keys
    return torch.randn(2, 4, length, size, dtype=dtype), *(
        torch.randn(2, groups, keys, size, dtype=dtype) for _ in "kv"
    )


def work_of(q, k, v, mask=None):
    return rg.Work(
        batch=q.shape[0], query_length=q.shape[2], key_length=k.shape[2], num_heads=q.shape[1], num_kv_heads=k.shape[1],
        qk_length=q.shape[3], value_length=v.shape[3], dtype=q.dtype, mask=mask,
    )  # fmt: skip


def counted(compute):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        compute()
    return counter.get_total_flops()


def streamed(mechanism, q, k, v, first, last):
    """Meet `first` tokens at once, then count the tokens up to `last` one by one."""
    state = mechanism.start(
        batch=q.shape[0], num_kv_heads=k.shape[1], qk_length=q.shape[3], value_length=v.shape[3], capacity=last
    )
    with torch.no_grad():
        _, state = mechanism.extend(q[:, :, :first], k[:, :, :first], v[:, :, :first], state, mask=rg.causal)

    def steps():
        now = state
        for i in range(first, last):
            token = slice(i, i + 1)
            _, now = mechanism.extend(q[:, :, token], k[:, :, token], v[:, :, token], now, mask=rg.causal)

    return counted(steps)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_causal_softmax_flops_are_those_of_its_stream(groups):
    q, k, v = make(33, groups)
    assert streamed(rg.Softmax(), q, k, v, 0, 33) == rg.cost(rg.Softmax(), work_of(q, k, v, rg.causal)).flops


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("mechanism", LINEAR, ids=repr)
def test_kernel_stream_flops_over_one_period_of_folding(mechanism, groups):
    half = RECENT // 2
    first, last = 3 * half, 4 * half
    q, k, v = make(last, groups)
    stated = sum(
        rg.cost(mechanism, replace(work_of(q, k, v), query_length=1, key_length=length + 1)).flops
        for length in range(first, last)
    )
    assert streamed(mechanism, q, k, v, first, last) == stated


@pytest.mark.parametrize("length", [1, 63, 255, 256, 257, 600])
@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([600, 70])], ids=repr)
@pytest.mark.parametrize("mechanism", LINEAR, ids=repr)
def test_kernel_prefill_flops_are_the_counted_ones(mechanism, mask, length):
    q, k, v = make(length, 2)
    if mask is not None and mask is not rg.causal:
        mask = rg.padding([length, length // 2])
    assert counted(lambda: rg.attend(q, k, v, mechanism, mask)) == rg.cost(mechanism, work_of(q, k, v, mask)).flops


@settings(max_examples=300, deadline=None, database=None)
@given(
    queries=st.integers(1, 3000),
    keys=st.integers(1, 3000),
    offset=st.none() | st.integers(-1500, 3000),
    which=st.integers(0, 2),
)
def test_a_long_walk_costs_what_its_steps_cost_one_by_one(queries, keys, offset, which):
    """Long walks are told from short ones: exact, whatever stands before, among and after the keys."""
    mechanism = (rg.Quadratic(), rg.Elu(), rg.RandomFeatures(n=16))[which]
    work = rg.Work(num_heads=4, num_kv_heads=2, qk_length=8, value_length=8)
    walked = sums_cost._flops(mechanism, work, steps(queries, keys, offset), False)
    assert sums_cost._walk_flops(mechanism, work, queries, keys, offset) == walked


def test_no_length_is_too_long_to_count_and_no_batch_too_large():
    long = rg.Work(batch=10**12, query_length=10**15, key_length=10**15, mask=rg.causal)
    assert rg.cost(rg.Quadratic(), long).flops < rg.cost(rg.Softmax(), long).flops
    assert rg.cost(rg.Quadratic(), replace(long, query_length=1)).flops > 0
    with pytest.raises(ValueError, match="key_length: expected a whole number of at least 0, at most"):
        rg.Work(key_length=10**15 + 1)


def test_kernel_flops_grow_linearly_and_softmax_quadratically():
    def flops(mechanism, length):
        return rg.cost(mechanism, rg.Work(query_length=length, key_length=length, mask=rg.causal)).flops

    assert flops(rg.Quadratic(), 1 << 17) / flops(rg.Quadratic(), 1 << 16) == pytest.approx(2, rel=0.01)
    assert flops(rg.Softmax(), 1 << 17) / flops(rg.Softmax(), 1 << 16) == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Softmax(softcap=5.0), rg.Argmax()], ids=repr)
def test_bytes_are_what_the_plain_contractions_touch(mechanism):
    dtype = torch.float64  # so that no path converts
    q, k, v = make(24, 2, dtype=dtype)
    stated = rg.cost(mechanism, work_of(q, k, v))
    with Traffic() as traffic:
        rg.attend(q, k, v, mechanism, path="reference")
    # Inputs and output once; the scores are written by one contraction and the weights read by the other.
    assert traffic.bytes == stated.bytes + 2 * stated.activation_bytes


def test_activation_memory_is_what_autograd_keeps():
    q, k, v = (t.requires_grad_() for t in make(40, 2))
    kept = saved_bytes(lambda q, k, v: rg.attend(q, k, v, path="reference"), q, k, v)
    assert kept == rg.cost(rg.Softmax(), work_of(q, k, v)).activation_bytes


@pytest.mark.parametrize("mechanism", [rg.Quadratic(), rg.Elu()], ids=repr)
def test_a_kernel_keeps_nothing_for_its_backward_pass(mechanism):
    q, k, v = (t.requires_grad_() for t in make(2000, 2))
    assert saved_bytes(lambda q, k, v: rg.attend(q, k, v, mechanism, rg.causal), q, k, v) == 0


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("mechanism", [rg.Quadratic(), rg.Elu(), rg.RandomFeatures(n=64)], ids=repr)
def test_kernel_memory_is_linear_in_the_length(mechanism, backward):
    def peak(length):
        q, k, v = make(length, 2, size=16)
        for t in (q, k, v):
            t.requires_grad_(backward)
        with Allocations() as allocations:
            out = rg.attend(q, k, v, mechanism, rg.causal)
            if backward:
                out.sum().backward()
        return allocations.peak

    short, long = peak(2048), peak(4096)
    assert long <= 2.05 * short
    if not backward:  # beyond the output, which is 2·4·N·16 floats, nothing grows with the length
        assert long - short <= 1.05 * 2 * 4 * 2048 * 16 * 4


def test_kernel_activation_memory_is_what_the_chunked_path_allocates():
    q, k, v = make(2048, 4, size=32)
    stated = rg.cost(rg.Quadratic(), work_of(q, k, v, rg.causal)).activation_bytes
    with Allocations() as allocations, torch.no_grad():
        out = rg.attend(q, k, v, rg.Quadratic(), rg.causal)
    taken = allocations.peak - out.numel() * 4
    assert stated <= taken <= 1.5 * stated


def test_a_decode_steps_activation_memory_is_what_it_allocates_at_most():
    q, k, v = make(400, 4, size=32)
    state = rg.Quadratic().start(batch=2, num_kv_heads=4, qk_length=32, value_length=32)
    with torch.no_grad():
        _, state = rg.Quadratic().extend(q, k, v, state, mask=rg.causal)
    stated = rg.cost(rg.Quadratic(), replace(work_of(q, k, v), query_length=1)).activation_bytes
    peaks = []
    for _ in range(RECENT):  # a fold is among them
        with Allocations() as allocations, torch.no_grad():
            _, state = rg.Quadratic().extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, mask=rg.causal)
        peaks.append(allocations.peak)
    assert 0.5 * stated <= max(peaks) <= 1.5 * stated


@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Quadratic(), rg.Elu()], ids=repr)
@pytest.mark.parametrize("length", [1, 100, 300])
def test_state_bytes_are_the_held_ones_at_any_length(mechanism, length):
    q, k, v = make(length, 2)
    state = mechanism.start(batch=2, num_kv_heads=2, qk_length=8, value_length=8, capacity=length)
    _, state = mechanism.extend(q, k, v, state, mask=rg.causal)
    assert state.nbytes == rg.cost(mechanism, work_of(q, k, v, rg.causal)).state_bytes


def test_a_mask_without_structure_counts_every_pair():
    work = rg.Work(query_length=8, key_length=8, num_heads=1, num_kv_heads=1, mask=rg.causal)
    hidden = replace(work, mask=rg.dense(torch.ones(8, 8, dtype=torch.bool).tril()))
    assert (work.pairs, hidden.pairs) == (36, 64)
    assert "all pairs count" in rg.cost(rg.Softmax(), hidden).note


def test_a_window_forces_the_quadratic_form_on_a_kernel_and_says_so():
    q, k, v = make(300)
    mask = rg.causal & rg.window(before=9)
    stated = rg.cost(rg.Quadratic(), work_of(q, k, v, mask))
    assert stated.form == "score"
    assert "quadratic in the length: a sliding window" in stated.note
    assert "quadratic in the length: a sliding window" in str(rg.explain(q, k, v, rg.Quadratic(), mask))
    assert rg.cost(rg.Quadratic(), work_of(q, k, v, rg.causal)).form == "linear"


def test_layer_cost_is_that_of_real_projections():
    embedding_dim, heads, groups, size, length = 32, 4, 2, 8, 10
    work = rg.Work(
        batch=2, query_length=length, key_length=length, num_heads=heads, num_kv_heads=groups,
        qk_length=size, value_length=size, dtype=torch.float32,
    )  # fmt: skip
    stated = rg.layer_cost(work, embedding_dim=embedding_dim)
    widths = [(embedding_dim, heads * size), *[(embedding_dim, groups * size)] * 2, (heads * size, embedding_dim)]
    layers = [torch.nn.Linear(*width, bias=False) for width in widths]
    assert stated.parameters == sum(p.numel() for layer in layers for p in layer.parameters())
    assert stated.projections.flops == counted(lambda: [l(torch.randn(2, length, l.in_features)) for l in layers])  # noqa: E741
    assert stated.attention == rg.cost(rg.Softmax(), work)
    assert stated.flops == stated.projections.flops + stated.attention.flops


def test_the_bottleneck_moves_from_projections_to_attention():
    def bottleneck(length):
        return rg.layer_cost(rg.Work(query_length=length, key_length=length), embedding_dim=2048).bottleneck

    assert (bottleneck(128), bottleneck(65536)) == ("projections", "attention")


@pytest.mark.parametrize("size", [16, 32, 64])
def test_from_the_crossover_on_the_second_is_cheaper(size):
    work = rg.Work(query_length=512, key_length=512, num_heads=4, num_kv_heads=4, qk_length=size, value_length=size,
                   mask=rg.causal)  # fmt: skip

    def gain(length):
        at = replace(work, query_length=length, key_length=length)
        return rg.cost(rg.Softmax(), at).flops - rg.cost(rg.Quadratic(), at).flops

    crossing = rg.crossover(rg.Softmax(), rg.Quadratic(), work)
    assert gain(crossing) > 0 >= gain(crossing - 1)
    assert all(gain(crossing * 2**i) > 0 for i in range(1, 8))


def test_decode_crosses_over_where_the_state_is_smaller_than_the_cache():
    work = rg.Work(num_heads=4, num_kv_heads=4, qk_length=16, value_length=16)
    crossing = rg.crossover(rg.Softmax(), rg.Quadratic(), work)
    assert 100 < crossing < 1000
    assert rg.crossover(rg.Quadratic(), rg.Softmax(), work) is None


def test_multi_query_decode_moves_fewer_bytes_for_the_same_flops():
    costs = {g: rg.cost(rg.Softmax(), rg.Work(num_kv_heads=g)) for g in (32, 8, 1)}
    assert costs[32].flops == costs[8].flops == costs[1].flops
    assert costs[32].bytes > 3.9 * costs[8].bytes > 3.9 * 7 * costs[1].bytes
    assert costs[1].intensity > 25 * costs[32].intensity


def test_hard_attention_computes_its_choice_in_float64():
    assert rg.cost(rg.Argmax(), rg.Work(dtype=torch.float32)).activation_bytes == 32 * 4096 * 8


def test_cross_attention_pays_for_all_its_keys():
    q, _, _ = make(10, 2)
    _, k, v = make(1000, 2)
    work = replace(work_of(q, k, v), cached=False)
    assert counted(lambda: rg.attend(q, k, v, rg.Quadratic())) == rg.cost(rg.Quadratic(), work).flops
    assert rg.cost(rg.Quadratic(), replace(work, cached=True)).flops < rg.cost(rg.Quadratic(), work).flops / 10
    whole, step = (rg.layer_cost(replace(work, cached=cached), embedding_dim=32) for cached in (False, True))
    assert whole.projections.flops > 10 * step.projections.flops


@pytest.mark.parametrize(("size", "groups"), [(32, 4), (64, 1), (16, 4)])
def test_beyond_the_crossover_there_is_no_way_back(size, groups):
    work = rg.Work(query_length=9, key_length=9, num_heads=4, num_kv_heads=groups, qk_length=size, value_length=size,
                   mask=rg.causal)  # fmt: skip
    crossing = rg.crossover(rg.Softmax(), rg.Quadratic(), work)
    for length in range(crossing, crossing + 600):
        at = replace(work, query_length=length, key_length=length)
        assert rg.cost(rg.Softmax(), at).flops > rg.cost(rg.Quadratic(), at).flops


# Formulas of a user's

W = torch.randn(8, 8)


def formula(similarity, methods=None, **fields):
    """A mechanism with this similarity."""
    names = {name: torch.nn.Parameter for name in fields}
    kind = type("Mine", (rg.Mechanism,), {"similarity": similarity, "__annotations__": names, **(methods or {})})
    return dataclass(frozen=True, kw_only=True)(kind)(**fields)


def weighing(weigh, ordered=False):
    """A mechanism that states its weights alone."""
    return dataclass(frozen=True, kw_only=True)(
        type("Weighing", (rg.Mechanism,), {"weigh": weigh, "ordered": ordered})
    )()


def parameter(*shape):
    return torch.nn.Parameter(torch.rand(*shape))


def shared(q, k):
    """q·k with each query head's own key head."""
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


FORMULAS = {
    "pairs": lambda: formula(lambda self, q, k: torch.sigmoid(q @ k.mT)),
    "queries": lambda: formula(lambda self, q, k: torch.sigmoid(q @ self.P @ k.mT), P=parameter(8, 8)),
    "a matrix for each key head": lambda: formula(lambda self, q, k: (q @ self.P @ k.mT).exp(), P=parameter(2, 8, 8)),
    "a module": lambda: formula(lambda self, q, k: (self.P(q) @ self.P(k).mT).exp(), P=torch.nn.Linear(8, 5)),
    "captured": lambda: formula(lambda self, q, k: torch.sigmoid(q @ W @ k.mT)),
    "no token's": lambda: formula(lambda self, q, k: torch.sigmoid(q @ (self.P @ self.P.mT) @ k.mT), P=parameter(8, 9)),
    "keys with keys": lambda: formula(lambda self, q, k: (q @ k.mT).exp() @ torch.softmax(k @ k.mT, -1)),
    "few keys": lambda: formula(lambda self, q, k: (q @ k[..., :16, :].mT @ k[..., :16, :] @ k.mT).exp()),
    "its own number": lambda: formula(lambda self, q, k: torch.sigmoid(q @ k.mT * self.P.item()), P=parameter(1)),
    "scores": lambda: dataclass(frozen=True, kw_only=True)(
        type("Score", (rg.ScoreMechanism,), {"score": lambda self, q, k: -((q @ W @ k.mT) ** 2)})
    )(),
    "weights alone": lambda: weighing(lambda self, q, k, visible, bias=None: torch.softmax(shared(q @ W, k), -1)),
    "weights of an order": lambda: weighing(
        lambda self, q, k, visible, bias=None: torch.softmax(shared(q, k), -1).tril(k.shape[2] - q.shape[2]), True
    ),
}


def seen(mechanism, work, flops):
    """Of the FLOPs of all pairs those that the mechanism sees: one with an order is causal by itself."""
    return flops * replace(work, mask=rg.causal).pairs // work.pairs if mechanism.ordered else flops


ORDERED = {name: mechanism for name, mechanism in REGISTRY.items() if mechanism.ordered}


@pytest.mark.parametrize("lengths", [(1, 70), (40, 70), (70, 70)], ids=str)
@pytest.mark.parametrize("name", [*ORDERED, "weights of an order"])
def test_a_mechanism_with_an_order_costs_what_it_costs_under_a_causal_mask(name, lengths):
    mechanism = ORDERED[name] if name in ORDERED else FORMULAS[name]()
    work = rg.Work(query_length=lengths[0], key_length=lengths[1], num_heads=4, num_kv_heads=2, qk_length=8)
    valid = rg.padding([60])
    assert rg.cost(mechanism, work) == rg.cost(mechanism, replace(work, mask=rg.causal))
    assert rg.cost(mechanism, replace(work, mask=valid)) == rg.cost(mechanism, replace(work, mask=rg.causal & valid))


@pytest.mark.parametrize("lengths", [(1, 70), (40, 70), (70, 70)], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formulas_flops_are_counted_whatever_it_contains(name, lengths):
    mechanism = FORMULAS[name]()
    q, k, v = make(lengths[0], 2, keys=lengths[1])
    stated = rg.cost(mechanism, work_of(q, k, v))
    run = counted(lambda: rg.attend(q, k, v, mechanism, path="reference"))
    assert (stated.flops, stated.note) == (seen(mechanism, work_of(q, k, v), run), "")
    assert rg.cost(mechanism, work_of(q, k, v, rg.causal)).flops < run or lengths[0] == 1


@pytest.mark.parametrize("lengths", [(1, 5000), (3000, 5000), (1 << 20, 1 << 20)], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formulas_flops_at_any_length_are_those_of_meta_tensors_of_that_length(name, lengths):
    mechanism, size = FORMULAS[name](), {"qk_length": 8, "value_length": 8, "num_heads": 4, "num_kv_heads": 2}
    work = rg.Work(batch=3, query_length=lengths[0], key_length=lengths[1], **size)
    q, k, v = (
        torch.empty(3, heads, length, 8, device="meta")
        for heads, length in zip((4, 2, 2), (*lengths, lengths[1]), strict=True)
    )
    with _WithoutNumbers():
        run = counted(lambda: mechanism.mix(mechanism.compare_heads(q, k), v))
    assert rg.cost(mechanism, work).flops == seen(mechanism, work, run)


def test_a_formula_is_counted_on_meta_tensors_and_nothing_of_it_is_changed():
    places, lengths = set(), set()

    def similarity(self, q, k):
        places.update((q.device.type, k.device.type))
        lengths.update((q.shape[-2], k.shape[-2]))
        self.P.add_(1)
        return torch.sigmoid(q @ self.P @ k.mT)

    mechanism = formula(similarity, P=torch.zeros(1 << 12, 1 << 12))
    rg.cost(mechanism, rg.Work(query_length=1 << 20, key_length=1 << 20, qk_length=1 << 12))
    assert places == {"meta"}
    assert max(lengths) <= 4 * 3 * COUNTED  # it may walk over the rows of a group in Python
    assert mechanism.P.device.type == "cpu"
    assert not mechanism.P.any()


@pytest.mark.parametrize("grows", [True, False], ids=["growing", "constant"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 2), (1, 90), (7, 300), (1, 900), (150, 700), (500, 1200)])
def test_a_state_of_ones_own_costs_what_its_real_steps_take(grows, queries, keys):
    mechanism, (q, k, v) = Averages(grows=grows), make(keys, 2)
    state = mechanism.start(batch=2, num_kv_heads=2, qk_length=8, value_length=8, capacity=keys)
    old, new = slice(0, keys - queries), slice(keys - queries, None)
    _, state = mechanism.extend(q[:, :, old], k[:, :, old], v[:, :, old], state)
    stated = rg.cost(mechanism, replace(work_of(q, k, v), query_length=queries))
    assert stated.flops == counted(lambda: mechanism.extend(q[:, :, new], k[:, :, new], v[:, :, new], state))
    _, state = mechanism.extend(q[:, :, new], k[:, :, new], v[:, :, new], state)
    assert stated.state_bytes == state.nbytes
    tokens = 2 * queries * (4 + 2) * (8 + 8) * 4
    assert stated.bytes == tokens + state.nbytes
    assert stated.form == ("score" if grows else "linear")
    assert ("extrapolated" in stated.note) == (keys > 384)
    whole = rg.cost(mechanism, work_of(q, k, v))
    assert (whole.form, whole.state_bytes) == ("score", state.nbytes)


def test_no_history_is_too_long_for_a_state_of_ones_own_and_a_window_is_its_formula():
    work = rg.Work(key_length=10**15, num_heads=4, num_kv_heads=2, qk_length=8, value_length=8)
    constant, growing = (rg.cost(Averages(grows=grows), work) for grows in (False, True))
    assert constant.flops < 1000
    assert constant.state_bytes < 1000
    assert growing.state_bytes > 10**15
    shorter = replace(work, key_length=64)
    assert rg.crossover(rg.Softmax(), Averages(grows=False), shorter, seconds=lambda m, at: rg.cost(m, at).bytes) < 64
    window = rg.cost(Averages(grows=False), replace(work, key_length=64, mask=rg.window(before=3)))
    assert "counted as its formula, not as a decode step: mask: expected causal" in window.note


def reads(x):
    return x * (2 if float(x.sum()) > 3 else 1)


@pytest.mark.parametrize(
    "mechanism",
    [
        formula(lambda self, q, k: torch.sigmoid(reads(q) @ W @ k.mT)),
        formula(lambda self, q, k: torch.from_numpy(q.numpy() @ W.numpy()).sigmoid() @ k.mT.abs()),
        rg.Kernel(feature_map=lambda x: reads(x).relu() @ W),
        rg.Gated(gate=lambda k: -reads(k @ W).abs()),
        rg.Delta(rate=lambda k: reads(k @ W).mean(-1, keepdim=True).sigmoid()),
    ],
    ids=["similarity", "numpy", "features", "gates", "rates"],
)
def test_a_formula_that_reads_numbers_is_counted_on_zeros_and_the_cost_says_so(mechanism):
    work = rg.Work(query_length=300, key_length=300, num_heads=4, num_kv_heads=2, qk_length=8, mask=rg.causal)
    assert re.search(r"counted on zeros: \w+ does not run on meta tensors", rg.cost(mechanism, work).note)
    window = replace(work, mask=rg.causal & rg.window(before=9))
    if isinstance(mechanism, rg.Kernel):
        assert re.search(r"quadratic in the length.*; FLOPs are counted on zeros", rg.cost(mechanism, window).note)


@dataclass(frozen=True, eq=False, kw_only=True)
class RecentTokens(rg.FixedState):
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Recent(rg.UnnormalisedMechanism):
    """The sum of the last values: a state that grows, and then does not."""

    ordered = True
    last: int

    def weigh(self, q, k, visible, bias=None):
        query = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        key = torch.arange(k.shape[2])
        near = ((key <= query) & (key > query - self.last)).to(q.dtype)
        return (near if visible is None else near * visible).expand(*q.shape[:3], k.shape[2])

    def state_type(self, qk_length):
        return RecentTokens

    def empty_state(self, sizes, capacity):
        keys, values = sizes.zeros(0, sizes.qk_length), sizes.zeros(0, sizes.value_length)
        return RecentTokens(mechanism=self, sizes=sizes, keys=keys, values=values)

    def advance(self, q, k, v, state, rule, bias):
        new = state.receive(q, k, v, rule)
        keys, values = torch.cat([new.state.keys, new.k], 2), torch.cat([new.state.values, new.v], 2)
        out = self.weigh(q, keys, None) @ values
        return new.attended(out, keys=keys[:, :, -self.last :], values=values[:, :, -self.last :])


@pytest.mark.parametrize("last", [200, 300])
@pytest.mark.parametrize("keys", [300, 1000, 100_000])
def test_a_state_that_stops_growing_costs_what_it_then_has(keys, last):
    work = rg.Work(query_length=1, key_length=keys, num_heads=2, num_kv_heads=2, qk_length=8, value_length=8,
                   mask=rg.causal, dtype=torch.float32)  # fmt: skip
    counted = rg.cost(Recent(last=last), work)
    assert counted.state_bytes == 2 * last * (8 + 8) * 4
    assert counted.flops == 2 * 2 * min(keys, last + 1) * 8
    assert counted.form == "linear"


def test_a_state_that_grows_more_and_more_slowly_never_costs_less_than_nothing(monkeypatch):
    monkeypatch.setattr("regard.core.cost.own_state.LONGEST_STEP", 128)
    sizes = {"num_heads": 2, "num_kv_heads": 2, "qk_length": 8, "mask": rg.causal, "dtype": torch.float32}
    costs = [rg.cost(Recent(last=300), rg.Work(key_length=keys, **sizes)) for keys in (384, 1000, 100_000)]
    assert costs[0].state_bytes < costs[1].state_bytes < costs[2].state_bytes
    assert costs[0].flops < costs[1].flops < costs[2].flops
    assert "measured up to 384 tokens and extrapolated" in costs[2].note
