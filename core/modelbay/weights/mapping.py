"""A file mapped into memory the way that tensors want it."""

from __future__ import annotations

import mmap
import sys
from typing import BinaryIO

# Python names the flag only from 3.13 on. Without it Linux counts a private mapping as memory that may be written, and
# refuses to map a file larger than RAM.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def map_private(file: BinaryIO) -> mmap.mmap:
    """The whole file, private: writable for torch, which wants that of a buffer, and never written back.

    Tensors made by ``torch.frombuffer`` keep the mapping alive but do not lock it: let go of it, never ``close`` it.

    Raises:
        OSError: it cannot be mapped. ValueError: it is empty.
    """
    if sys.platform == "win32":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | _NORESERVE
    return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def give_back(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Drop the pages of these bytes from the process: a neighbour's part of the first or last page is read again."""
    if end > begin and hasattr(mmap, "MADV_DONTNEED"):
        start = begin - begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)
