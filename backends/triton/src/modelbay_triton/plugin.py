"""What modelbay-triton adds to Modelbay: the kernel set "triton". Imports nothing heavy.

Every op is registered twice. Compiled, for CUDA, it goes before the torch reference. Interpreted (TRITON_INTERPRET=1),
for tests and debugging on any device, it comes after it: only ``kernels="triton"`` asks for it.
"""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import KernelSpec

_COMPILED_PRIORITY = 20
_INTERPRETED_PRIORITY = -10
_DTYPES = ("float32", "bfloat16", "float16")

#: Op -> (implementation, constraint).
_OPS = {
    "rms_norm": ("modelbay_triton.norm:rms_norm", "modelbay_triton.constraints:rms_norm"),
    "rotary": ("modelbay_triton.rotary:rotary", None),
    "act_and_mul": ("modelbay_triton.activation:act_and_mul", "modelbay_triton.constraints:act_and_mul"),
    "write_cache": ("modelbay_triton.cache:write_cache", None),
    "attention.full": ("modelbay_triton.attention:attention", "modelbay_triton.constraints:attention"),
    "attention.sliding": ("modelbay_triton.attention:attention", "modelbay_triton.constraints:attention"),
}


@hookimpl
def register_kernels() -> list[KernelSpec]:
    return [spec for op in _OPS for spec in (_compiled(op), _interpreted(op))]


def _compiled(op: str) -> KernelSpec:
    target, constraint = _OPS[op]
    return KernelSpec(
        set="triton",
        op=op,
        target=target,
        devices=("cuda",),
        dtypes=_DTYPES,
        constraint=constraint,
        available="modelbay_triton.availability:compiled",
        priority=_COMPILED_PRIORITY,
    )


def _interpreted(op: str) -> KernelSpec:
    target, constraint = _OPS[op]
    return KernelSpec(
        set="triton",
        op=op,
        target=target,
        devices=("cpu", "cuda"),
        dtypes=_DTYPES,
        constraint=constraint,
        available="modelbay_triton.availability:interpreted",
        priority=_INTERPRETED_PRIORITY,
    )
