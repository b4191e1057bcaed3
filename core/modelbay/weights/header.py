"""The header of a safetensors file, read and checked without touching the tensors.

Format: 8 bytes little-endian length N; N bytes of JSON ``{name: {dtype, shape, data_offsets: [begin, end]}}`` with an
optional ``__metadata__``; then the data, to which the offsets are relative. The ranges cover the data without gap or
overlap (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from modelbay.checked_json import RepeatedKeyError, unique_keys
from modelbay.errors import WeightsError
from modelbay.weights.diagnose import damaged

#: The same limit as the reference implementation: a longer header is an attack or an accident.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 64  # what a torch tensor can have

#: safetensors dtype -> (torch name, bytes per element).
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: ``begin`` and ``end`` are byte offsets in the file."""

    name: str
    dtype: str  # torch name
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class _BadHeader(Exception):
    """What is wrong, in words; `read_header` adds which file."""


def read_header(path: Path) -> tuple[HeaderEntry, ...]:
    """The tensors of one safetensors file, in the order of their data.

    Raises:
        WeightsError: the file is absent, truncated, an LFS pointer, or its header is not valid.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to open a pipe is to wait for whoever writes into it
            raise WeightsError(f"weight file {path} is not a regular file.")
        size = status.st_size
        with path.open("rb") as file:
            raw = _header_bytes(file.read(8), size, file)
        return _entries(_parse(raw), data_start=8 + len(raw), file_size=size)
    except OSError as error:
        raise damaged(path, f"cannot be opened ({error.strerror or error})") from error
    except _BadHeader as error:
        raise damaged(path, str(error), "Download it again.") from error


def _header_bytes(prefix: bytes, size: int, file: Any) -> bytes:
    if len(prefix) < 8:
        raise _BadHeader(f"it is {size} bytes long, too short for a safetensors header")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _BadHeader(f"its header claims {length} bytes (limit {MAX_HEADER_BYTES}): not a safetensors file")
    if 8 + length > size:
        raise _BadHeader(f"truncated: the header alone takes {8 + length} bytes, the file has {size}")
    raw: bytes = file.read(length)
    if len(raw) < length:
        raise _BadHeader("truncated inside the header")
    return raw


def _parse(raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise _BadHeader("its header is not a JSON object: not a safetensors file")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise _BadHeader(f"its header has the key {_short(error.key)} twice") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _BadHeader(f"its header is not valid JSON ({type(error).__name__})") from error
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _BadHeader("its __metadata__ is not an object of strings")
    return header


def _entries(header: dict[str, Any], *, data_start: int, file_size: int) -> tuple[HeaderEntry, ...]:
    data_size = file_size - data_start
    entries = sorted(
        (_entry(name, value, data_start) for name, value in header.items()), key=lambda entry: (entry.begin, entry.end)
    )
    position = data_start
    for entry in entries:
        if entry.begin != position:
            what = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise _BadHeader(f"the data of {_short(entry.name)} {what}")
        position = entry.end
    if position > file_size:
        raise _BadHeader(f"truncated: its tensors need {position - data_start} bytes, {data_size} are there")
    if position < file_size:
        raise _BadHeader(f"it has {file_size - position} bytes that belong to no tensor")
    return tuple(entries)


def _entry(name: str, value: Any, data_start: int) -> HeaderEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _BadHeader(f"the entry of {_short(name)} does not consist of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _BadHeader(f"tensor {_short(name)} has dtype {_short(dtype)}, which is not supported")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise _BadHeader(f"the shape of {_short(name)} is not a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _BadHeader(f"the data_offsets of {_short(name)} are not [begin, end]")
    torch_name, itemsize = DTYPES[dtype]
    begin, end = offsets
    if prod(shape) * itemsize != end - begin:
        raise _BadHeader(
            f"tensor {_short(name)} of shape {_short(shape)} and {dtype} does not fill {end - begin} bytes"
        )
    return HeaderEntry(name, torch_name, tuple(shape), data_start + begin, data_start + end)


def _naturals(value: Any) -> bool:
    """A list of non-negative 63-bit integers (and no booleans, which Python counts as integers)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
