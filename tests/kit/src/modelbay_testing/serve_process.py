"""`modelbay serve` as a process of its own, which ends with the block that started it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


class ServeProcess:
    """A server, the address that it said, and what it wrote to standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait_until_ready(self, seconds: float = 90) -> None:
        """Until the first model is loaded.

        Raises:
            AssertionError: the process ended, or took too long; with what it said.
        """
        end = time.monotonic() + seconds
        while not (self._find_url() and self.status("/ready") == 200):
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < end, self.lines
            time.sleep(0.1)

    def _find_url(self) -> str:
        said = re.search(r"listening on (https?://\S+)", "\n".join(self.lines))
        self.url = said[1] if said else ""
        return self.url

    def status(self, path: str) -> int:
        """The status of a GET, or 0 where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait(self, seconds: float = 60) -> int:
        """Its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code


@contextmanager
def serve_process(*argv: str, dtype: str = "float32", **environ: str) -> Iterator[ServeProcess]:
    """``modelbay serve ARGV`` on the CPU and a free port, on one thread unless ``environ`` says otherwise."""
    command = [sys.executable, "-m", "modelbay", "serve", *argv, "--port", "0", "--device", "cpu", "--dtype", dtype]
    started = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip
    try:
        yield ServeProcess(started)
    finally:
        started.kill()
        started.wait()
