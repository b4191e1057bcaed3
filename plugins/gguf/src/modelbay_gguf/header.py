"""The header of a GGUF file: metadata and the table of tensors, read once, no tensor touched, no torch.

Why not a library's reader: `gguf.GGUFReader` builds an array object for every token of the vocabulary (over a
second for 50,000 tokens), and the one in Transformers refuses files that hold Q5_0 or Q5_1.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from modelbay.errors import WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LFS_POINTER = b"version https://git-lfs"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # ggml's own limit: more means that the header is damaged

#: Types that hold values as they are, and the torch name of each.
PLAIN_TYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
#: Types that hold blocks, dequantised to float32 on reading.
BLOCK_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in (
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    )
)  # fmt: skip

_STRUCTS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_U32, _U64 = _STRUCTS[GGUFValueType.UINT32], _STRUCTS[GGUFValueType.UINT64]


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings (a vocabulary, merges) that was walked over and not kept: only its length."""

    count: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file: ``shape`` in torch order, ``offset`` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        return self.type not in PLAIN_TYPES

    @property
    def dtype(self) -> str:
        """The torch name of what reading gives."""
        return PLAIN_TYPES.get(self.type, "float32")


@dataclass(frozen=True)
class Header:
    """What stands before the tensors in one GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    def quantized_types(self) -> dict[str, int]:
        """How many tensors are stored in each block type, ``{"Q4_1": 210, "Q8_0": 1}``."""
        return dict(Counter(tensor.type.name for tensor in self.tensors if tensor.is_quantized))


def read_header(path: Path) -> Header:
    """Read the header of one file.

    Raises:
        WeightsError: not a GGUF file, a version or byte order that is not read, a truncated or damaged file, or a
            tensor type that cannot be dequantised; the message names the file and the cause.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise WeightsError(f"cannot read {path}: {error}.") from error


class _Reader:
    """A position in the mapped file that only moves forward."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def header(self) -> Header:
        self._check_start()
        try:
            tensor_count, metadata_count = self.number(_U64), self.number(_U64)
            metadata = self.metadata(metadata_count)
            tensors = self.tensors(tensor_count, metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        except (struct.error, OverflowError):  # a length that no file can have overflows the position
            self.fail(f"the header runs past the end of the file ({len(self.data)} bytes): truncated download?")
        except UnicodeDecodeError:
            self.fail("the header holds a name that is not UTF-8: damaged file?")
        return Header(self.path, metadata, tensors)

    def _check_start(self) -> None:
        start = self.data[: len(LFS_POINTER)]
        if start == LFS_POINTER:
            raise WeightsError(f"{self.path} is a Git LFS pointer, not the file itself.", hint="Run `git lfs pull`.")
        if start[:4] != MAGIC:
            raise WeightsError(f"{self.path} is not a GGUF file: it starts with {start[:4]!r} instead of {MAGIC!r}.")
        if len(self.data) < 24:
            self.fail(f"it ends after {len(self.data)} bytes, within the header: truncated download?")
        self.position = 4
        version = self.number(_U32)
        if version & 0xFFFF == 0:  # the version is a small number: its bytes are swapped
            raise WeightsError(f"{self.path} is a big-endian GGUF file; only little-endian ones are read.")
        if version not in VERSIONS:
            raise WeightsError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 are read.", hint="Convert the model anew."
            )

    def fail(self, what: str) -> NoReturn:
        raise WeightsError(f"{self.path} cannot be read as GGUF: {what}")

    def number(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self.data, self.position)[0]
        self.position += kind.size
        return value

    def string(self) -> str:
        length = self.number(_U64)
        end = self.position + length
        if end > len(self.data):
            raise struct.error
        value = self.data[self.position : end].decode("utf-8")
        self.position = end
        return value

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if key in values:
                self.fail(f"the metadata key {key!r} stands there twice.")
            values[key] = self.value(self.number(_U32), key)
        return values

    def value(self, kind: int, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self.array(self.number(_U32), self.number(_U64), key)
        if kind not in _STRUCTS:
            self.fail(f"the metadata key {key!r} has the unknown value type {kind}: damaged file?")
        return self.number(_STRUCTS[GGUFValueType(kind)])

    def array(self, kind: int, count: int, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.skip_strings(count)
        if kind not in _STRUCTS:
            self.fail(f"the metadata key {key!r} is an array of the unknown value type {kind}: damaged file?")
        element = _STRUCTS[GGUFValueType(kind)]
        if count * element.size > len(self.data) - self.position:
            raise struct.error
        values = struct.unpack_from(f"<{count}{element.format[1:]}", self.data, self.position)
        self.position += count * element.size
        return list(values)

    def skip_strings(self, count: int) -> StringArray:
        unpack, data, position = _U64.unpack_from, self.data, self.position
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        self.position = position
        return StringArray(count)

    def tensors(self, count: int, alignment: Any) -> tuple[TensorInfo, ...]:
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, not a power of two from 8 up.")
        table = [self.tensor_row() for _ in range(count)]
        start = -(-self.position // alignment) * alignment
        tensors = tuple(self.tensor(start, *row) for row in table)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            name = Counter(tensor.name for tensor in tensors).most_common(1)[0][0]
            self.fail(f"the tensor {name!r} stands there twice.")
        return tensors

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in torch order (ggml writes the fastest dimension first), type id, offset."""
        name = self.string()
        dimensions = self.number(_U32)
        if dimensions > MAX_DIMENSIONS:
            self.fail(f"the tensor {name!r} has {dimensions} dimensions: damaged file?")
        shape = tuple(self.number(_U64) for _ in range(dimensions))[::-1]
        return name, shape, self.number(_U32), self.number(_U64)

    def tensor(self, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        kind = self.tensor_type(name, type_id)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block_elements:
            self.fail(
                f"the rows of {name!r} have {shape[-1]} values, not a multiple of {kind.name}'s {block_elements}."
            )
        nbytes = prod(shape) // block_elements * block_bytes
        end = start + offset + nbytes
        if end > len(self.data):
            self.fail(f"{name!r} should end at byte {end}, the file has {len(self.data)} bytes: truncated download?")
        return TensorInfo(name, shape, kind, start + offset, nbytes)

    def tensor_type(self, name: str, type_id: int) -> GGMLQuantizationType:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            self.fail(f"the tensor {name!r} has the unknown type {type_id}; a newer `gguf` package may know it.")
        if kind not in PLAIN_TYPES and kind not in BLOCK_TYPES:
            known = ", ".join(kind.name for kind in (*PLAIN_TYPES, *BLOCK_TYPES))
            self.fail(f"the tensor {name!r} is stored as {kind.name}; supported: {known}.")
        return kind


__all__ = ["BLOCK_TYPES", "PLAIN_TYPES", "Header", "StringArray", "TensorInfo", "read_header"]
