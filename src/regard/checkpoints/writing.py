"""safetensors files, written tensor by tensor: no second copy of the tensors is made."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.sources import DTYPES
from regard.core.files import naming

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
"""What safetensors calls the dtypes."""

Entry = tuple[str, torch.dtype, Sequence[int]]
"""The name, dtype and shape of a tensor in a file."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file; an OSError names it.

    >>> import tempfile, torch
    >>> from regard.checkpoints.sources import open_folder
    >>> from regard.checkpoints.writing import save_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tensors({"weight": torch.ones(2, 3)}, Path(folder) / "model.safetensors")
    ...     open_folder(folder).shapes
    {'weight': (2, 3)}
    """
    ordered = in_order(tensors)
    save_pieces(entries(ordered), ordered.values(), path)


def save_pieces(named: Iterable[Entry], pieces: Iterable[Tensor], path: Path) -> None:
    """Write tensors to a safetensors file as they come, in the order of `in_order`; an OSError names it.

    >>> import tempfile, torch
    >>> from regard.checkpoints.writing import save_pieces
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.safetensors"
    ...     save_pieces([("weight", torch.float32, (2, 3))], (torch.ones(2, 3) for _ in range(1)), path)
    ...     path.stat().st_size
    136
    """
    with naming(path), path.open("wb") as file:
        file.write(header(named, {"format": "pt"}))
        for piece in pieces:
            file.write(raw(piece))


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the order of a file: the widest dtypes first, so that each is aligned to its item size.

    >>> import torch
    >>> from regard.checkpoints.writing import in_order
    >>> list(in_order({"byte": torch.ones(1, dtype=torch.uint8), "double": torch.ones(1, dtype=torch.float64)}))
    ['double', 'byte']
    """
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def entries(tensors: Mapping[str, Tensor]) -> list[Entry]:
    """The names, dtypes and shapes of tensors; ValueError for a dtype that safetensors has not.

    >>> import torch
    >>> from regard.checkpoints.writing import entries
    >>> entries({"weight": torch.ones(2, 3)})
    [('weight', torch.float32, torch.Size([2, 3]))]
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in KINDS:
            raise ValueError(f"tensors: expected {', '.join(KINDS.values())}, got {tensor.dtype} as {name!r}")
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def header(named: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a safetensors file whose tensors follow one after another.

    >>> import torch
    >>> from regard.checkpoints.writing import header
    >>> header([("a", torch.uint8, (2,))])
    b'@\\x00\\x00\\x00\\x00\\x00\\x00\\x00{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}    '
    """
    values: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in named:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        values[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(values).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy if it is contiguous and on the CPU.

    >>> import torch
    >>> from regard.checkpoints.writing import raw
    >>> raw(torch.tensor([1, 2], dtype=torch.uint8)).tolist()
    [1, 2]
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
