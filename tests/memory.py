"""What a computation allocates and touches, seen from torch's dispatcher."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CONTRACTIONS = {torch.ops.aten.bmm.default, torch.ops.aten.mm.default}


class Allocations(TorchDispatchMode):
    """Live bytes of tensors made inside, and their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.live_keys = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id(t.untyped_storage()._cdata) for t in flat(args)} | {t.untyped_storage()._cdata for t in flat(args)}
        out = func(*args, **(kwargs or {}))
        for tensor in flat([out]):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in before or key in self.live_keys:
                continue
            self.live_keys.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        return out

    def _freed(self, key, size):
        self.live_keys.discard(key)
        self.live -= size


class Traffic(TorchDispatchMode):
    """Bytes the contractions read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in CONTRACTIONS:
            self.bytes += sum(t.numel() * t.element_size() for t in [*flat(args), out])
        return out


def flat(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def saved_bytes(compute, *inputs):
    """Bytes autograd keeps for the backward pass, besides the inputs."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compute(*inputs)
    for tensor in inputs:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    storages.pop(out.untyped_storage().data_ptr(), None)
    return sum(storages.values())
