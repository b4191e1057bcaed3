"""Damaged and foreign files end in one line that names the file and the cause (W3)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as Q

from modelbay.errors import WeightsError
from modelbay_gguf.header import StringArray, read_header


def _refused(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_header_is_what_the_gguf_package_reads(write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf("llama", Q.Q4_0)
    header, reference = read_header(tiny.path), gguf.GGUFReader(tiny.path)
    for tensor, expected in zip(header.tensors, reference.tensors, strict=True):
        assert tensor.name == expected.name
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.type == expected.tensor_type
        assert (tensor.offset, tensor.nbytes) == (expected.data_offset, expected.n_bytes)
    for key, field in reference.fields.items():
        if key.startswith("GGUF."):
            continue
        expected = field.contents()
        strings = isinstance(expected, list) and isinstance(expected[0], str)
        assert header.metadata[key] == (StringArray(len(expected)) if strings else expected), key


def test_w3_a_truncated_file_is_named_wherever_it_ends(write_gguf: Callable[..., Any], tmp_path: Path) -> None:
    tiny = write_gguf("llama", Q.Q8_0)
    whole = tiny.path.read_bytes()
    data = read_header(tiny.path).tensors[0].offset
    for end in (5, 20, 30, data // 3, data // 2, data - 40, data + 100, len(whole) - 1):
        cut = tmp_path / f"cut-{end}.gguf"
        cut.write_bytes(whole[:end])
        assert "truncated download" in _refused(cut), end


def test_w3_an_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    _refused(path)


def test_w3_an_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "pointer.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS pointer" in _refused(path)


def test_w3_another_kind_of_file_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in _refused(path)


@pytest.mark.parametrize(
    ("version", "said"),
    [(struct.pack("<I", 1), "version 1"), (struct.pack("<I", 4), "version 4"), (struct.pack(">I", 3), "big-endian")],
)
def test_w3_unreadable_versions_are_named(write_gguf: Callable[..., Any], version: bytes, said: str) -> None:
    path = write_gguf().path
    content = bytearray(path.read_bytes())
    content[4:8] = version
    path.write_bytes(content)
    assert said in _refused(path)


def _with_type(path: Path, name: str, type_id: int) -> None:
    """Change the type of one tensor in the table: name, u32 rank, u64 per dimension, u32 type."""
    content = bytearray(path.read_bytes())
    key = struct.pack("<Q", len(name)) + name.encode()
    after = content.index(key) + len(key)
    (rank,) = struct.unpack_from("<I", content, after)
    struct.pack_into("<I", content, after + 4 + 8 * rank, type_id)
    path.write_bytes(content)


@pytest.mark.parametrize(("type_id", "said"), [(999, "unknown type 999"), (int(Q.I32), "I32")])
def test_w3_a_tensor_type_that_cannot_be_read_is_named(write_gguf: Callable[..., Any], type_id: int, said: str) -> None:
    path = write_gguf().path
    _with_type(path, "blk.1.ffn_up.weight", type_id)
    message = _refused(path)
    assert said in message
    assert "blk.1.ffn_up.weight" in message


def test_w3_a_damaged_byte_ends_in_our_error_or_in_none(write_gguf: Callable[..., Any], tmp_path: Path) -> None:
    """Whatever a header holds, no other exception than ours comes out."""
    whole = write_gguf().path.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for position in range(4, 6000, 7):
        content = bytearray(whole)
        content[position] ^= 0xFF
        damaged.write_bytes(content)
        with contextlib.suppress(WeightsError):
            read_header(damaged)
