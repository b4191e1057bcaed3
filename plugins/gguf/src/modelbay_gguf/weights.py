"""The load format: a lazy table of tensors, dequantised one at a time, a few rows at once."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf.quants import quant_shape_to_byte_shape

from modelbay.errors import WeightsError
from modelbay.weights.formats import Index, TensorEntry
from modelbay.weights.mapping import give_back, map_private
from modelbay_gguf import files as gguf_files
from modelbay_gguf.archs import ARCHS
from modelbay_gguf.header import Header, TensorInfo, read_header

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles

#: Values dequantised in one go: small enough to stay in the cache (about 30 % faster than a whole embedding at once),
#: and to keep what numpy needs in between out of the peak.
CHUNK = 1 << 17


class Gguf:
    """The load format ``gguf``."""

    def select(self, files: ModelFiles) -> tuple[str, ...]:
        return gguf_files.select(files)

    def open(self, files: ModelFiles, config: ModelConfig, args: EngineArgs) -> GgufSource:
        names = self.select(files)
        if not names:
            raise WeightsError(f"{files.reference} holds no .gguf file.")
        return GgufSource(dict(zip(names, files.fetch(names), strict=True)))


class GgufSource:
    """An open model of one or several .gguf files. Follows `modelbay.weights.formats.WeightSource`."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """``paths``: the files of the model in order, by the name that the LoadReport shows."""
        self._files: dict[str, _MappedFile] = {}
        self._tensors: dict[str, tuple[_MappedFile, TensorInfo]] = {}
        self._entries: dict[str, TensorEntry] = {}
        try:
            for name, path in paths.items():
                self._add(name, path)
            self._check_split(next(iter(paths)))
        except BaseException:
            self.close()
            raise
        first = next(iter(self._files.values())).header
        arch = ARCHS.get(first.metadata.get("general.architecture", ""))
        self._norm_offset = arch.norm_offset if arch else 0.0

    def _add(self, name: str, path: Path) -> None:
        file = _MappedFile(read_header(path))
        self._files[name] = file
        for tensor in file.header.tensors:
            if tensor.name in self._tensors:
                raise WeightsError(f"{tensor.name} stands in {name} and in {self._entries[tensor.name].file}.")
            self._tensors[tensor.name] = file, tensor
            self._entries[tensor.name] = TensorEntry(tensor.name, tensor.shape, tensor.dtype, name, tensor.nbytes)

    def _check_split(self, name: str) -> None:
        """A shard renamed to look whole, or a shard of another split, shows in the counts of the first one."""
        metadata = self._files[name].header.metadata
        count, tensors = metadata.get("split.count", 0) or 1, metadata.get("split.tensors.count")
        if count != len(self._files):
            raise WeightsError(f"{name} says that it is one of {count} shards; {len(self._files)} were found.")
        if tensors is not None and count > 1 and tensors != len(self._tensors):
            raise WeightsError(f"the shards of {name} hold {len(self._tensors)} tensors; it says {tensors}.")

    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        """The tensor, dequantised to float32; F32, F16 and BF16 as they are, as views of the mapped file.

        Norm weights that the file stores with an offset (Gemma's 1 + w) come without it.
        """
        file, tensor = self._tensors[name]
        value = _dequantize(file.bytes(tensor), tensor, index) if tensor.is_quantized else file.view(tensor, index)
        if self._norm_offset and name.endswith("norm.weight"):
            value = (value.float() - self._norm_offset).to(value.dtype)
        return value

    def release(self, name: str) -> None:
        file, tensor = self._tensors[name]
        file.release(tensor)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _MappedFile:
    """One open file."""

    def __init__(self, header: Header) -> None:
        self.header = header
        with header.path.open("rb") as file:
            self._map: mmap.mmap | None = map_private(file)

    @property
    def map(self) -> mmap.mmap:
        if self._map is None:
            raise WeightsError(f"{self.header.path} was closed; its tensors cannot be read any more.")
        return self._map

    def bytes(self, tensor: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The blocks of a quantised tensor, uint8 [..., bytes of a row]."""
        flat = np.frombuffer(self.map, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.type))

    def view(self, tensor: TensorInfo, index: Index) -> torch.Tensor:
        dtype = getattr(torch, tensor.dtype)
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=dtype)
        flat = torch.frombuffer(self.map, dtype=dtype, count=prod(tensor.shape), offset=tensor.offset)
        whole = flat.view(tensor.shape)
        return whole if index is None else whole[index]

    def release(self, tensor: TensorInfo) -> None:
        give_back(self.map, tensor.offset, tensor.offset + tensor.nbytes)

    def close(self) -> None:
        """Let go of the map. It is unmapped here, or with the last tensor that still looks at it: `torch.frombuffer`
        keeps the map object alive but does not lock it, so closing it would leave such a tensor over unmapped memory.
        """
        self._map = None


def _dequantize(blocks: np.ndarray, tensor: TensorInfo, index: Index) -> torch.Tensor:
    """``index`` of the dequantised tensor. Rows are chosen before, columns after each chunk is unpacked."""
    index = tuple(index or ())
    index += (slice(None),) * (len(tensor.shape) - len(index))
    chosen, columns = blocks[index[:-1]], index[-1]
    width = len(range(*columns.indices(tensor.shape[-1])))
    rows = chosen.reshape(-1, blocks.shape[-1])
    out = np.empty((len(rows), width), np.float32)
    step = max(1, CHUNK // tensor.shape[-1])
    with np.errstate(all="ignore"):  # a block whose scale is inf or nan is the model's business
        for start in range(0, len(rows), step):
            out[start : start + step] = gguf.dequantize(rows[start : start + step], tensor.type)[:, columns]
    return torch.from_numpy(out).view(*chosen.shape[:-1], width)
