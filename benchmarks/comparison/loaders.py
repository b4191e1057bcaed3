"""One load in a fresh process: ``python -m comparison.loaders LOADER MODEL DTYPE`` prints time and peak as JSON.

Imports, config and the module on meta come before the clock starts: what is measured is reading the weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Load = Callable[[], Any]

PAGE = 4096


def main() -> None:
    name, model, dtype = sys.argv[1:]
    load = LOADERS[name](model, dtype)
    before = reset_peak()
    start = time.perf_counter()
    loaded = load()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": status("VmHWM") - before, **facts(loaded)}))


def prepare_modelbay(model: str, dtype: str, kernels: str = "torch") -> Load:
    """Through `load_weights`, into the module that the engine would run; those kernels take weights as they are."""
    import modelbay.weights.safetensors  # noqa: F401 - loaded by its name otherwise, at the first use
    from modelbay import resolve
    from modelbay_runtime.build import build_model
    from modelbay_runtime.loading import load_weights

    resolution = resolve(model, dtype=dtype, kernels=kernels)
    built = build_model(resolution)
    context = built.context

    def load() -> tuple[Any, Any]:
        # The module is returned too: the weights must be alive when the peak is read.
        return load_weights(built.module, resolution, device=context.device, dtype=context.dtype), built.module

    return load


def prepare_repacked(model: str, dtype: str) -> Load:
    """The same with the kernels that are chosen here, each weight in the form that they want."""
    return prepare_modelbay(model, dtype, kernels="auto")


def prepare_safetensors(model: str, dtype: str) -> Load:
    """Nothing but the library: every tensor of every file, in memory of its own, in the dtype asked for."""
    import torch
    from safetensors import safe_open

    wanted = getattr(torch, dtype)
    torch.ones(1).to(wanted)

    def load() -> dict[str, Any]:
        tensors = {}
        for path in sorted(Path(model).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensors[name] = file.get_tensor(name).to(wanted, copy=True)
        return tensors

    return load


def prepare_hf(model: str, dtype: str) -> Load:
    """Transformers' ``from_pretrained``; its modelling code is imported before.

    It maps files and reads them when they are first used, so here they are: one number of each page.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))

    def load() -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        for parameter in loaded.parameters():
            parameter.detach().view(-1)[:: PAGE // parameter.element_size()].sum()
        return loaded

    return load


LOADERS: dict[str, Callable[[str, str], Load]] = {
    "modelbay": prepare_modelbay,
    "modelbay-repacked": prepare_repacked,
    "safetensors": prepare_safetensors,
    "hf": prepare_hf,
}


def facts(loaded: Any) -> dict[str, Any]:
    """What the load report knows beyond time and memory, where there is one."""
    report = loaded[0] if isinstance(loaded, tuple) else None
    if report is None:
        return {}
    return {"bytes": report.bytes_model, "largest_tensor": max(use.nbytes for use in report.tensors.values())}


def reset_peak() -> int:
    """Let the kernel's peak of this process start anew; returns what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status("VmRSS")


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes. Pages of mapped files count as resident."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise LookupError(key)


if __name__ == "__main__":
    main()
