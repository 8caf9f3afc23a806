"""GGUF files: what is good is read right, and no count or length in them is trusted.

Tests named after a defect are of defects that other readers of these files had (FIELD.md).
"""

import struct
import sys

import numpy as np
import pytest
import torch

from hostile_formats import make_gguf
from regard.checkpoints import gguf_file
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.gguf_file import open_gguf
from regard.checkpoints.names import NAMES, resolve

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize(
    "kind", [kind for kind, (name, *_) in gguf_file.TYPES.items() if name != "F32"], ids=lambda k: gguf_file.TYPES[k][0]
)
def test_gguf_dequantizes_as_gguf_does(kind, tmp_path):
    name, block, size = gguf_file.TYPES[kind]
    quant = gguf.GGMLQuantizationType(kind)
    assert (name, (block, size)) == (quant.name, gguf.GGML_QUANT_SIZES[quant])
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("a", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "a.gguf")
    assert file.shapes == {"a": (3, 2 * block)}
    assert file.read("a").dtype == torch.float32
    assert torch.equal(file.read("a"), torch.from_numpy(gguf.quants.dequantize(raw, quant)))


def test_gguf_metadata(tmp_path):
    make_gguf(tmp_path)
    metadata = open_gguf(tmp_path / "model.gguf").metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.tokens"][-1] == "é"
    assert metadata["tokenizer.ggml.token_type"].tolist() == [3, 3, 1, 1, 1, 1]
    assert [part.tolist() for part in metadata["nested"]] == [[1, 2], [3, 4]]
    assert metadata["tokenizer.ggml.add_bos_token"] is True


def test_gguf_without_its_package_says_how_to_get_it(tmp_path, monkeypatch):
    make_gguf(tmp_path)
    file = open_gguf(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert file.read("d").shape == (2, 32)
    with pytest.raises(CheckpointError, match=r'pip install "regard\[gguf\]"'):
        file.read("e")


def gguf_bytes(tensors=(), metadata=b"", keys=0, version=3, data=b""):
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), keys) + metadata
    for name, shape, kind, offset in tensors:
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return head + bytes(-len(head) % 32) + data


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def alignment(value):
    return string("general.alignment") + struct.pack("<II", 4, value)


@pytest.mark.parametrize(
    ("tensors", "size", "message"),
    [
        # CVE-2025-53630: sizes whose product or sum passes 2⁶⁴ and comes out small
        ([("a", (2**32, 2**32), 0, 0)], 32, "fits a file"),
        ([("a", (2**62, 4), 0, 0)], 32, "whole numbers"),
        ([("a", (2**61 + 1, 8), 0, 0)], 32, "fits a file"),
        ([("a", (8,), 0, 0), ("b", (8,), 0, 2**64 - 32)], 64, "begin where"),
        # CVE-2026-7482: tensors larger than the file
        ([("a", (9,), 0, 0)], 32, "inside the file"),
        ([("a", (2**40,), 0, 0)], 32, "inside the file"),
        ([("a", (8,), 0, 0), ("b", (8,), 0, 0)], 64, "begin where"),
        ([("a", (8,), 0, 0), ("b", (8,), 0, 64)], 96, "begin where"),
        ([("a", (8,), 0, 0), ("a", (8,), 0, 32)], 64, "every tensor once"),
        ([("a", (8,), 0, 4)], 64, "steps of 32"),
        ([("a", (8,), 0, 0)], 64, "32 bytes of data"),
        ([("a", (8,) * 5, 0, 0)], 32, "1 to 4 axes"),
        ([("a", (), 0, 0)], 32, "1 to 4 axes|no such"),
        ([("a", (8,), 99, 0)], 32, "a known type"),
        ([("a", (8,), 4, 0)], 32, "a known type"),
        ([("a", (31,), 8, 0)], 34, "multiple of 32"),
    ],
)
def test_cve_2025_53630_and_2026_7482_gguf_tensors_that_do_not_fit(tensors, size, message, tmp_path):
    (tmp_path / "a").write_bytes(gguf_bytes(tensors, data=bytes(size)))
    with pytest.raises(CheckpointError, match=message):
        open_gguf(tmp_path / "a")


@pytest.mark.parametrize(
    ("metadata", "keys"),
    [
        (b"", 2**64 - 1),
        (b"", 1),
        (struct.pack("<Q", 2**64 - 1) + b"abc", 1),
        (string("a") + struct.pack("<I", 13), 1),
        (string("a") + struct.pack("<I", 8) + struct.pack("<Q", 2**63), 1),
        (string("a") + struct.pack("<IIQ", 9, 8, 2**61), 1),
        (string("a") + struct.pack("<IIQ", 9, 0, 2**64 - 1), 1),
        (string("a") + struct.pack("<IIQ", 9, 12, 2**61), 1),
        (string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000, 1),
        (string("a") + struct.pack("<IIQ", 9, 9, 100) + bytes(10), 1),
        (string("a") + struct.pack("<IB", 0, 1) + string("a") + struct.pack("<IB", 0, 1), 2),
        (struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1), 1),
        (alignment(0), 1),
        (alignment(33), 1),
        (alignment(2**31), 1),
        (string("general.alignment") + struct.pack("<I", 8) + string("32"), 1),
    ],
)
def test_gguf_counts_and_lengths_are_held_against_the_file(metadata, keys, tmp_path):
    (tmp_path / "a").write_bytes(gguf_bytes(metadata=metadata, keys=keys))
    with pytest.raises(CheckpointError):
        open_gguf(tmp_path / "a")


def test_gguf_versions(tmp_path):
    for version, message in ((1, "version"), (4, "version"), (0x03000000, "big-endian")):
        (tmp_path / "a").write_bytes(gguf_bytes(version=version))
        with pytest.raises(CheckpointError, match=message):
            open_gguf(tmp_path / "a")
    (tmp_path / "a").write_bytes(gguf_bytes([("a", (8,), 0, 0)], version=2, data=bytes(32)))
    assert open_gguf(tmp_path / "a").read("a").tolist() == [0] * 8
    (tmp_path / "a").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(CheckpointError, match="begins with b'GGML'"):
        open_gguf(tmp_path / "a")


def test_gguf_reads_as_its_own_reader_does(tmp_path):
    make_gguf(tmp_path)
    ours, theirs = open_gguf(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    assert list(ours.shapes) == [tensor.name for tensor in theirs.tensors]
    assert ours.metadata.keys() == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for tensor in theirs.tensors:
        assert ours.shapes[tensor.name] == tuple(int(n) for n in reversed(tensor.shape))
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(ours.read(tensor.name), expected)


@pytest.mark.skipif(NAMES["smollm2"].find() is None, reason=NAMES["smollm2"].command)
def test_smollm2_is_read():
    file = open_gguf(resolve("smollm2"))
    assert len(file.shapes) == 272
    assert file.shapes["token_embd.weight"] == (49152, 576)
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    for name in ("token_embd.weight", "blk.29.ffn_down.weight", "blk.29.attn_q.weight", "output_norm.weight"):
        weight = file.read(name)
        assert weight.shape == file.shapes[name]
        assert 0.01 < weight.std() < 2
        assert weight.abs().max() < 50
