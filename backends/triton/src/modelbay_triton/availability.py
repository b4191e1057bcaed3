"""Whether Triton kernels can run in this process, and how. Asked at every build, so it imports Triton only if it must.

Triton decides between compiler and interpreter when it is imported: its own library functions are of one kind or the
other from then on.
"""

from __future__ import annotations

import importlib.util
import os

_VARIABLE = "TRITON_INTERPRET"


def interpreter_requested() -> bool:
    """What Triton itself reads in the variable."""
    return os.environ.get(_VARIABLE, "").strip().lower() in ("1", "true", "t", "yes", "y", "on")


def compiled() -> str | None:
    """None if kernels will be compiled here, else the reason."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreter_requested():
        return f"{_VARIABLE} is set, so kernels are interpreted"
    return None


def interpreted() -> str | None:
    """None if kernels will be interpreted here, else the reason."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not interpreter_requested():
        return f"without a CUDA device Triton only interprets kernels, for tests; that needs {_VARIABLE}=1"
    import triton
    import triton.language as tl

    if isinstance(tl.zeros, triton.JITFunction):
        return f"{_VARIABLE} was set after triton had been imported; set it before Python starts"
    return None
