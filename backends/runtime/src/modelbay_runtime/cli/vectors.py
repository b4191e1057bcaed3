"""Embeddings to a file as they come: a NumPy array, or a JSON object a line. A file has its name once it is
complete; of one that never is, nothing is left."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from modelbay.errors import UsageError


class Writer(Protocol):
    """``count`` vectors so far, each of ``size`` numbers."""

    count: int
    size: int

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
        self.stream, self.path = stream, path
        self.count, self.size = 0, 0

    def write(self, ids: Sequence[Any], vectors: Sequence[Sequence[float]]) -> None:
        for own, vector in zip(ids, vectors, strict=True):
            entry = {"index": self.count, **({} if own is None else {"id": own}), "embedding": list(vector)}
            self.stream.write(json.dumps(entry) + "\n")
            self.count, self.size = self.count + 1, len(vector)
        self.stream.flush()

    def close(self, *, complete: bool) -> None:
        if self.path is not None:
            _finish(self.stream, self.path, complete)


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
        _finish(self.stream, self.path, complete, last=self._header)

    def _header(self) -> None:
        self.stream.seek(0)
        shape = (self.count, self.size)
        np.lib.format.write_array_header_1_0(self.stream, {"descr": "<f4", "fortran_order": False, "shape": shape})


def _npy(path: Path) -> Npy:
    return Npy(open(_partial(path), "wb"), path)


def _jsonl(path: Path) -> JsonLines:
    return JsonLines(open(_partial(path), "w", encoding="utf-8"), path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _finish(stream: IO[Any], path: Path, complete: bool, last: Callable[[], None] = lambda: None) -> None:
    """Write what comes ``last``, and give the file its name; or leave nothing of it."""
    try:
        if complete:
            last()
            stream.close()
            os.replace(_partial(path), path)
    finally:
        with suppress(OSError):  # of a full disk the first error is the one to tell
            stream.close()
        _partial(path).unlink(missing_ok=True)
