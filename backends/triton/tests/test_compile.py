"""The kernels compile for CUDA. That needs no GPU: Triton brings NVIDIA's assembler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Bytes that one program can have on every device since compute capability 8.0 (8.6 and 8.9 have the least).
_SHARED_MEMORY = 99 * 1024


@pytest.mark.parametrize("extent", ["quick", pytest.param("thorough", marks=pytest.mark.deep)])
def test_every_kernel_compiles_and_fits_shared_memory(tmp_path, extent):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_cuda.py")), extent],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(name, capability) for name, capability, _ in compiled} == {
        (name, capability)
        for name in (
            "attend_kernel", "combine_kernel", "_rms_norm_kernel", "_rotary_kernel", "_act_and_mul_kernel",
            "_write_cache_kernel",
        )
        for capability in (80, 90)
    }  # fmt: skip
    assert [entry for entry in compiled if entry[2] > _SHARED_MEMORY] == []
