"""What a result has to say about where and from what it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

#: Instruction sets that decide how fast low precision is.
_NOTABLE = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve")

#: What a measurement depends on.
_MEASURED = ("core", "backends", "plugins", "benchmarks")


def facts() -> dict[str, Any]:
    """Date, commit, and the machine: model and number of its cores, memory, what else runs."""
    model, flags = cpu()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {
            "cpu": model,
            "cores": len(os.sched_getaffinity(0)),
            "instructions": [flag for flag in _NOTABLE if flag in flags],
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "load_before": round(os.getloadavg()[0], 2),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
    }


def cpu() -> tuple[str, set[str]]:
    """The CPU's name and its instruction sets, as the kernel has them."""
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return model, flags
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
    return model, flags


def commit() -> str:
    """The checkout's commit, with ``+changes`` if the code that is measured differs from it."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *_MEASURED)
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
