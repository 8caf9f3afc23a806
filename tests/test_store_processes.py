"""Checkpoints of several processes: shards, errors on one of them, other numbers of processes; kills of runs."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import chaos
import forked
from processes import finished
from regard.training import store
from test_store import empty, examples, files_of_at_most, names, same


class Small(nn.Module):
    """A model of odd sizes: shards are uneven, and of some tensors a process has none."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())


def trained(model, sharded):
    """Train a model for one step, so that the optimizer has a state; returns all tensors by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{part}": tensor for part, tensor in optimizer.state[parameter].items()}
    assert sharded == any(hasattr(tensor, "full_tensor") for tensor in tensors.values())
    return tensors


def full(tensors):
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in tensors.items()
    }


def two_processes(folder):
    """The work of each of two processes; returns the results for the tests."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}

    def caught(work):
        try:
            work()
        except (ValueError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    plain = examples()
    private = {f"random.{rank}": torch.full((9,), rank, dtype=torch.uint8)}
    path = store.save(folder / "plain", 5, {**plain, **private}, {"rank": rank}, keep=1)
    back = empty({**plain, **private})
    results["plain note"] = store.load(path, back)
    results["plain differs"] = [name for name, tensor in {**plain, **private}.items() if not same(tensor, back[name])]
    results["plain parts"] = [len(load_file(part)) for part in sorted(path.glob("*.safetensors"))]

    mesh = init_device_mesh("cpu", (2,))
    sharded = trained(fully_shard(Small(0), mesh=mesh), sharded=True)
    path = store.save(folder / "sharded", 5, sharded, {}, keep=1)
    whole = full(sharded)
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, folder / "expected.safetensors")
    other = trained(fully_shard(Small(1), mesh=mesh), sharded=True)
    assert not any(same(tensor, full(other)[name]) for name, tensor in whole.items() if tensor.ndim == 2)
    store.load(path, other)
    results["sharded differs"] = [name for name, tensor in full(other).items() if not same(tensor, whole[name])]
    results["sharded parts"] = [sorted(load_file(part)) for part in sorted(path.glob("*.safetensors"))]

    store.load(store.newest(folder / "single")[0], other)
    expected = load_file(folder / "single.safetensors")
    results["from one differs"] = [name for name, tensor in full(other).items() if not same(tensor, expected[name])]

    with files_of_at_most(100 if rank == 1 else 2**30):
        results["full disk"] = caught(lambda: store.save(folder / "sharded", 10, sharded, {}, keep=1))
    results["left"] = names(folder / "sharded")
    bad = {"bad": torch.zeros(2, dtype=torch.complex64)} if rank == 1 else {}
    results["bad tensor"] = caught(lambda: store.save(folder / "sharded", 10, {**sharded, **bad}, {}, keep=1))
    lacking = {"lacking": torch.zeros(2)} if rank == 1 else {}
    results["lacking"] = caught(lambda: store.load(path, {**other, **lacking}))
    apart = folder / ("plain" if rank else "sharded") / "step-00000005"
    results["apart"] = caught(lambda: store.load(apart, {}))
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of two processes, and the results of each."""
    folder = tmp_path_factory.mktemp("two")
    single = trained(Small(2), sharded=False)
    store.save(folder / "single", 5, single, {}, keep=1)
    save_file(single, folder / "single.safetensors")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, str(folder)]
    done = finished(*command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_save_what_they_hold_alike_once(two):
    _, ranks = two
    for result in ranks:
        assert result["plain note"] == {"rank": 0}
        assert result["plain differs"] == []
        assert sum(result["plain parts"]) == len(examples()) + 2
        assert min(result["plain parts"]) > 1, "they share the work"


def test_two_processes_save_their_shards(two):
    _, ranks = two
    assert [result["sharded differs"] for result in ranks] == [[], []]
    first, second = ranks[0]["sharded parts"]
    assert "first.weight[0:4, 0:5]" in first
    assert "first.weight[4:7, 0:5]" in second


def test_one_process_loads_what_two_saved(two):
    folder, _ = two
    expected = load_file(folder / "expected.safetensors")
    loaded = empty(expected)
    store.load(folder / "sharded" / "step-00000005", loaded)
    assert [name for name in expected if not same(expected[name], loaded[name])] == []
    loaded = empty({**examples(), "random.1": torch.zeros(9, dtype=torch.uint8)})
    store.load(folder / "plain" / "step-00000005", loaded)
    assert [name for name, tensor in examples().items() if not same(tensor, loaded[name])] == []
    assert loaded["random.1"].tolist() == [1] * 9


def test_two_processes_load_what_one_saved(two):
    _, ranks = two
    assert [result["from one differs"] for result in ranks] == [[], []]


def test_what_fails_on_one_process_raises_on_both(two):
    folder, ranks = two
    for result in ranks:
        assert result["full disk"] == (
            f"OSError: [Errno 27] checkpoint of step 10: File too large: {str(folder / 'sharded')!r}"
        )
        assert result["left"] == ["step-00000005"]
        assert "got torch.complex64 as 'bad'" in result["bad tensor"]
        assert result["lacking"].endswith("expected the tensors of this run, got no 'lacking'")
        assert "expected the same checkpoint on all processes, got different checkpoints" in result["apart"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_and_shards_of_a_gpu(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    tensors = {name: tensor.cuda() for name, tensor in examples().items()}
    loaded = {name: tensor.cuda() for name, tensor in empty(tensors).items()}
    store.load(store.save(tmp_path / "plain", 5, tensors, {}, keep=1), loaded)
    assert [name for name in tensors if not same(tensors[name], loaded[name])] == []
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        sharded, other = (fully_shard(Small(seed).cuda(), mesh=mesh).state_dict() for seed in range(2))
        store.load(store.save(tmp_path / "sharded", 5, sharded, {}, keep=1), other)
        assert [name for name, tensor in full(sharded).items() if not same(tensor, full(other)[name])] == []
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_killed_runs_of_two_processes_go_on_bitwise(tmp_path):
    """A sample of `make chaos`, as the next."""
    tally = chaos.chaos("store", 2, [2], seed=2, out=tmp_path, at_once=1)
    assert tally.failures == []
    assert sum(tally.kills.values()) == 2


def test_killed_runs_of_every_recipe_go_on_bitwise(tmp_path):
    """Ten kills of forks, two of each recipe: where a file is written, and in a step or at the start."""
    with forked.forks() as forks:
        tally = chaos.chaos("train", 10, [1], seed=4, out=tmp_path, at_once=1, recipes=chaos.RECIPES, forks=forks)
    assert tally.failures == []
    assert sum(tally.kills.values()) == 10


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = two_processes(folder)
    (folder / f"results-{os.environ['RANK']}.json").write_text(json.dumps(result))
