"""Load a directory of weights into any module tree, with a config of which only what the loader asks for is there."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from modelbay.args import EngineArgs
from modelbay.plugins import load_plugins
from modelbay.source import ModelFiles
from modelbay.specs import ArchSpec
from modelbay.trace import Trace
from modelbay.weights.accounting import LoadReport
from modelbay.weights.transforms import Transform
from modelbay_runtime.loading import load_weights

_PEAK = """
import torch
from pathlib import Path
from torch import nn
from modelbay_runtime.layout import Section
from modelbay_runtime.loading import load_weights
from modelbay_testing.bare_loading import bare_resolution, meta_parameter

torch.set_num_threads(1)
{build}
what = bare_resolution(Path({root!r}))
torch.ones(1).bfloat16()


def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))


open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
report = load_weights(model, what, device="cpu", dtype=torch.bfloat16)
print(status("VmHWM") - before, report.bytes_model)
"""


def meta_parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def bare_files(root: Path) -> ModelFiles:
    return ModelFiles(str(root), "local", root, tuple(sorted(path.name for path in root.iterdir())))


def bare_resolution(
    root: Path,
    *,
    layers: int = 1,
    tied: bool = False,
    transforms: Sequence[Transform] = (),
    plugins: Sequence[ModuleType] = (),
    **args: Any,
) -> Any:
    """What `load_weights` reads of a resolution, for the weights in ``root``; heads are 2 of 4, and 1 of keys."""
    config = SimpleNamespace(
        tie_word_embeddings=tied, num_layers=layers, num_heads=2, num_kv_heads=1, head_size=4, sources={},
        quantization=None, backbone_dtypes={},
        get=lambda key, default=None: default,
    )  # fmt: skip
    return SimpleNamespace(
        args=EngineArgs.create(str(root), **args),
        plugins=load_plugins(list(plugins)),
        files=bare_files(root),
        config=config,
        arch=ArchSpec(name="Tiny", target="x:Y", transforms=tuple(transforms)),
        trace=Trace(),
    )


def load_bare(
    root: Path, model: nn.Module, dtype: torch.dtype | None = None, **options: Any
) -> tuple[LoadReport, Trace]:
    """Fill ``model`` on CPU. options: as for `bare_resolution`."""
    what = bare_resolution(root, **options)
    report = load_weights(model, what, device="cpu", dtype=dtype)
    assert report.unaccounted() == []
    json.dumps(report.to_dict())
    return report, what.trace


def peak_of_loading(root: Path, build: str) -> tuple[int, int]:
    """Bytes that loading ``root`` takes at its peak, and those of the parameters, in a process of its own on Linux.

    Args:
        build: code that makes ``model``, a module tree on meta.
    """
    script = _PEAK.format(build=textwrap.dedent(build), root=str(root))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    peak, model_bytes = map(int, done.stdout.split())
    return peak, model_bytes
