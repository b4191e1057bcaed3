"""Load format ``safetensors``: headers first, then tensors as views of mapped memory, page by page."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from modelbay.errors import WeightsError
from modelbay.weights.diagnose import damaged
from modelbay.weights.formats import Index, TensorEntry
from modelbay.weights.header import HeaderEntry, read_header
from modelbay.weights.index import SHARD, FileNames, check_index, merge_entries, select_files, trace_files
from modelbay.weights.mapping import give_back, map_private

if TYPE_CHECKING:
    import torch

    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

NAMES = FileNames(
    indexes=("model.safetensors.index.json",),
    whole="model.safetensors",
    patterns=(("model.safetensors", f"model{SHARD}.safetensors"), ("*.safetensors",)),
)

#: Neighbours are given back together: each call makes all cores of the process forget addresses.
_RELEASE_BYTES = 4 << 20


class Safetensors:
    """The load format."""

    def select(self, files: ModelFiles) -> tuple[str, ...]:
        return select_files(files, NAMES)

    def trace_files(self, files: ModelFiles, selected: tuple[str, ...], trace: Trace) -> None:
        trace_files(files, NAMES, selected, trace)

    def open(self, files: ModelFiles, config: ModelConfig, args: EngineArgs) -> SafetensorsSource:
        names = self.select(files)
        if not names:
            raise WeightsError(f"{files.reference} has no .safetensors files.")
        source = SafetensorsSource(dict(zip(names, files.fetch(names), strict=True)))
        try:
            check_index(files, NAMES.indexes, {name: entry.file for name, entry in source.entries().items()})
        except BaseException:
            source.close()
            raise
        return source


class SafetensorsSource:
    """Open safetensors files. Every header is checked on opening; data is mapped at the first read.

    Args:
        paths: relative name to path.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._maps: dict[str, mmap.mmap] = {}
        self._released: tuple[str, int, int] | None = None  # file, begin, end: not given back yet
        headers = {file: read_header(path) for file, path in self._paths.items()}
        self._sizes = {file: max((entry.end for entry in entries), default=0) for file, entries in headers.items()}
        self._where: dict[str, tuple[str, HeaderEntry]] = merge_entries(
            ((file, [(file, entry) for entry in entries]) for file, entries in headers.items()),
            lambda item: item[1].name,
        )

    def entries(self) -> Mapping[str, TensorEntry]:
        return {
            name: TensorEntry(name, entry.shape, entry.dtype, file, entry.nbytes)
            for name, (file, entry) in self._where.items()
        }

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        import torch

        file, entry = self._where[name]
        dtype = getattr(torch, entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        mapped = self._map(file)
        if entry.begin % dtype.itemsize:  # legal, though no writer of today does it; torch wants aligned elements
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=entry.begin)
            flat = raw.clone().view(dtype)
        else:
            flat = torch.frombuffer(mapped, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.begin)
        tensor = flat.view(entry.shape)
        return tensor if index is None else tensor[index]

    def release(self, name: str) -> None:
        file, entry = self._where[name]
        begin = entry.begin
        if self._released is not None:
            if self._released[0] == file and self._released[2] == begin:
                begin = self._released[1]
            else:
                self._give_back()
        self._released = (file, begin, entry.end)
        if entry.end - begin >= _RELEASE_BYTES:
            self._give_back()

    def _give_back(self) -> None:
        if self._released is not None and (mapped := self._maps.get(self._released[0])) is not None:
            give_back(mapped, *self._released[1:])
        self._released = None

    def close(self) -> None:
        """Let go of the files. Views that are still alive hold the mapping, which ends with the last of them: torch
        keeps the mapping object but no lock on it, so closing it here would pull the memory from under them."""
        self._maps.clear()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            path = self._paths[file]
            try:
                with path.open("rb") as handle:
                    self._maps[file] = map_private(handle)
            except (OSError, ValueError) as error:
                raise damaged(path, f"it cannot be mapped into memory ({error})") from error
            if len(self._maps[file]) < self._sizes[file]:
                raise damaged(path, "it became shorter after it was opened", "Load it again when it is complete.")
        return self._maps[file]
