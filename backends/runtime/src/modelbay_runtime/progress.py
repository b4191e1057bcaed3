"""Progress bars: on a terminal, never in a log."""

from __future__ import annotations

import sys

from tqdm import tqdm


def progress_bar(total: int, what: str, wanted: bool = True) -> tqdm:
    """A bar on stderr, silent if it is not a terminal."""
    return tqdm(total=total, desc=what, disable=not wanted or not sys.stderr.isatty(), dynamic_ncols=True)
