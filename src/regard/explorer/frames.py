"""The framing of answers that carry numbers.

    uint32: length of the JSON | JSON, UTF-8 | uint32: length of the data | data          little-endian

Frames follow each other, so that a page can draw the first layer while the last one is still computed. Weights come as
the bytes they are: a million of them as JSON would be ten times as long.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

LENGTH = struct.Struct("<I")


def frame(header: Mapping[str, Any], data: bytes = b"") -> bytes:
    """One frame.

    >>> frame({"type": "run"}, b"abc")
    b'\\x0e\\x00\\x00\\x00{"type":"run"}\\x03\\x00\\x00\\x00abc'
    """
    text = json_text(header).encode()
    return LENGTH.pack(len(text)) + text + LENGTH.pack(len(data)) + data


def read_frames(content: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The frames of an answer: their headers and data.

    >>> [(header["type"], data) for header, data in read_frames(frame({"type": "run"}, b"abc"))]
    [('run', b'abc')]
    """
    place = 0
    while place < len(content):
        parts = []
        for _ in ("header", "data"):
            (length,) = LENGTH.unpack_from(content, place)
            place += LENGTH.size + length
            parts.append(content[place - length : place])
        yield json.loads(parts[0]), parts[1]


def json_text(value: Any) -> str:
    """Compact JSON; numbers that JSON cannot express (NaN, infinities) become null.

    >>> json_text({"entropy": float("nan"), "beta": float("inf")})
    '{"entropy":null,"beta":null}'
    """
    return json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def tensor_bytes(tensor: Tensor) -> bytes:
    """The numbers of a tensor, row by row, in the machine's (little-endian) order."""
    return tensor.detach().cpu().contiguous().numpy().tobytes()
