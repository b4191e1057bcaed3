"""``python -m modelbay_runtime.parallel FILE``: how rank 0 starts another rank.

It watches rank 0 before it imports anything: where memory is short that may take minutes, and rank 0 may be gone.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

#: The exit code of a rank whose rank 0 is gone.
LOST = 3


def end_with_parent(folder: Path) -> None:
    """The pipe that stdin is closes when the process that started this one ends; its folder may be left then."""

    def watch() -> None:
        sys.stdin.buffer.read()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(LOST)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent(Path(sys.argv[1]).parent)

    from modelbay_runtime.parallel.worker import main

    main(sys.argv[1])
