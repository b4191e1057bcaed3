"""Commands that start processes of their own, ended with all of them whatever happens."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def ended(processes: Sequence[subprocess.Popen[str]] | Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """After the block none of them runs, nor any process that one of them started and that is still its child."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):  # some live for a moment only
                        child.kill()
                process.kill()
                process.wait()


def ranks_of(program: int) -> list[psutil.Process]:
    """The ranks that the program with this process id started and that run, whatever else it starts for a moment."""
    ranks = []
    for child in psutil.Process(program).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("modelbay_runtime.parallel" in argument for argument in child.cmdline()):
                ranks.append(child)
    return ranks


def run_to_end(command: Sequence[str], *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command's outcome, with what it wrote.

    Raises:
        TimeoutExpired: after ``timeout`` seconds.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ended([process]):
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
