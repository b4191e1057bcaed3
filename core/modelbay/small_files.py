"""Reading small files that other people wrote: only what is a file, and never more than a bound.

To open a pipe is to wait for whoever writes into it, and a device like ``/dev/zero`` never ends.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

#: For what people write: settings, records, templates.
LIMIT_BYTES = 2**24
#: For what belongs to a checkpoint: an index that names a hundred thousand tensors has more than 10 MB.
MODEL_LIMIT_BYTES = 2**28


def read_bytes(path: Path, *, limit: int = LIMIT_BYTES) -> bytes:
    """The content of a file of at most ``limit`` bytes.

    Raises:
        OSError: it is absent, cannot be read, is no regular file, or is larger; ``strerror`` says which.
    """
    _check_regular(os.stat(path).st_mode, path)  # before it is opened: that alone does something to some devices
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        _check_regular(status.st_mode, path)
        # What /proc generates has no size, so what comes is counted too.
        content = b"" if status.st_size > limit else file.read(limit + 1) or b""
    if max(status.st_size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it is larger than the {limit >> 20} MiB that such a file may have", str(path))
    return content


def read_text(path: Path, *, encoding: str = "utf-8", limit: int = LIMIT_BYTES) -> str:
    """The same as text, line ends as ``\\n``.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: it is no text in this encoding.
    """
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, limit=limit)), encoding=encoding).read()


def _check_regular(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting, in case a pipe has taken the place of the file that was looked at."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
