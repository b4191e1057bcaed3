"""Embeddings to a file as they come: a NumPy array, or a JSON object a line. What is not complete has another name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from modelbay.errors import UsageError


class Writer(Protocol):
    def write(self, ids: Sequence[Any], vectors: Sequence[Sequence[float]]) -> None: ...

    def close(self, *, complete: bool) -> None: ...


def open_writer(name: str) -> Writer:
    """A writer for ``FILE.npy``, ``FILE.jsonl``, or ``-``: JSON lines on standard output.

    Raises:
        UsageError: another ending, or a file that cannot be written.
    """
    if name == "-":
        return JsonLines(sys.stdout, None)
    path = Path(name)
    makers: dict[str, Callable[[Path], Writer]] = {".npy": _npy, ".jsonl": _jsonl}
    if path.suffix not in makers:
        raise UsageError(f"--output {name}: the ending says the format: .npy or .jsonl.")
    if path.is_dir():  # seen when the file gets its name otherwise: after all the work
        raise UsageError(f"cannot write {name}: it is a directory.")
    try:
        return makers[path.suffix](path)
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror}.") from error


class JsonLines:
    """``{"index": 0, "embedding": […]}``, with the input's own ``id`` where it has one."""

    def __init__(self, stream: IO[str], path: Path | None) -> None:
        self.stream, self.path, self.count = stream, path, 0

    def write(self, ids: Sequence[Any], vectors: Sequence[Sequence[float]]) -> None:
        for own, vector in zip(ids, vectors, strict=True):
            entry = {"index": self.count, **({} if own is None else {"id": own}), "embedding": list(vector)}
            self.stream.write(json.dumps(entry) + "\n")
            self.count += 1
        self.stream.flush()

    def close(self, *, complete: bool) -> None:
        if self.path is not None:
            self.stream.close()
            _name(self.path, complete)


class Npy:
    """A float32 array [lines, numbers]. Its header, which says how many lines there are, is written again at the end;
    NumPy leaves room in it for that."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self.stream, self.path = stream, path
        self.count, self.size = 0, 0

    def write(self, ids: Sequence[Any], vectors: Sequence[Sequence[float]]) -> None:
        rows = np.asarray(vectors, np.dtype("<f4"))
        if not self.count:
            self.size = rows.shape[1]
            self._header()
        self.stream.write(rows.tobytes())
        self.count += len(rows)

    def close(self, *, complete: bool) -> None:
        self.stream.seek(0)
        self._header()
        self.stream.close()
        _name(self.path, complete)

    def _header(self) -> None:
        shape = (self.count, self.size)
        np.lib.format.write_array_header_1_0(self.stream, {"descr": "<f4", "fortran_order": False, "shape": shape})


def _npy(path: Path) -> Npy:
    return Npy(open(_partial(path), "wb"), path)


def _jsonl(path: Path) -> JsonLines:
    return JsonLines(open(_partial(path), "w", encoding="utf-8"), path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _name(path: Path, complete: bool) -> None:
    if complete:
        os.replace(_partial(path), path)
