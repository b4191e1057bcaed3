"""Modelbay: any Hugging Face model reference, made a running, batched, parallel PyTorch model by plugins.

Importing this package is cheap: what needs torch is imported when it is first used.
"""

from __future__ import annotations

from typing import Any

# These three are functions, and also the modules they live in. Imported here, while the package is set up, the
# functions keep the names: Python binds a submodule to its package only once, when it first loads it.
from modelbay.architectures import architectures
from modelbay.backends import backends
from modelbay.hookspecs import hookimpl
from modelbay.resolve import resolve

__version__ = "0.1.0"

# Name -> where it lives. The entries of modelbay_runtime are the one upward reference of the core,
# written as data so that the core never imports what stands on it.
_LAZY = {
    "LLM": "modelbay_runtime.llm:LLM",
    "SamplingParams": "modelbay_runtime.sampling_params:SamplingParams",
    "PoolingParams": "modelbay_runtime.sampling_params:PoolingParams",
    "StructuredOutputs": "modelbay_runtime.structured.spec:StructuredOutputs",
}

__all__ = [
    "LLM", "PoolingParams", "SamplingParams", "StructuredOutputs", "__version__", "architectures", "backends",
    "hookimpl", "resolve",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    target = _LAZY.get(name)
    if target is None:
        raise AttributeError(f"module 'modelbay' has no attribute {name!r}")
    import importlib

    module, _, attribute = target.partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("modelbay_runtime"):
            raise ImportError(f"modelbay.{name} needs the runtime: pip install modelbay-runtime") from error
        raise
    globals()[name] = value
    return value
