"""Compile every kernel for CUDA on a machine without it, with the arguments that the ops launch it with.

Prints one JSON line per compilation: kernel, compute capability, bytes of shared memory. Run by test_compile.py in a
process of its own, where Triton is not interpreted.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from modelbay_runtime.kernels.attention import AttentionSpec
from modelbay_runtime.step import KVGroupStep, Step
from modelbay_triton import attention as triton_attention
from modelbay_triton.activation import act_and_mul
from modelbay_triton.cache import write_cache
from modelbay_triton.constraints import ACTIVATIONS
from modelbay_triton.norm import rms_norm
from modelbay_triton.rotary import rotary

_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if value is None:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def compile_for(*capabilities: int) -> None:
    """From here on, compile for these instead of launching."""

    def run(kernel, *args, grid, warmup, **options):
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        signature = {p.name: "constexpr" if p.is_constexpr else _type(given[p.name]) for p in kernel.params}
        constants = {name: given[name] for name, kind in signature.items() if kind == "constexpr"}
        for capability in capabilities:
            source = ASTSource(kernel, signature, constexprs=constants)
            done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert done.asm["cubin"]
            print(json.dumps([kernel.fn.__name__, capability, done.metadata.shared]))

    triton.JITFunction.run = run


def _step() -> tuple[Step, KVGroupStep]:
    """One decoding sequence and one prefill."""
    step = Step(
        positions=torch.tensor([19, 0, 1]),
        query_start=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([20, 2], dtype=torch.int32),
        query_lens=[1, 2],
        context_lens=[20, 2],
        num_decodes=1,
    )
    tables = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
    return step, KVGroupStep(torch.tensor([19, 32, 33]), tables, torch.zeros(2, dtype=torch.int32), 16)


def _attend(dtype: torch.dtype, sizes: tuple[int, int], splits: int, special: bool) -> None:
    triton_attention.num_splits = lambda *_: splits
    step, group = _step()
    window, softcap = (8, 30.0) if special else (None, None)
    spec = AttentionSpec(6, 2, *sizes, scale=0.1, window=window, softcap=softcap)
    width = 2 * sum(sizes)
    q, rows, cache = torch.zeros(3, 6, sizes[0]), torch.zeros(3, width), torch.zeros(3, 16, width)
    sinks = torch.zeros(6, dtype=dtype) if special else None
    triton_attention.attention(q.to(dtype), rows.to(dtype), cache.to(dtype), step, group, spec, sinks)


def _small_ops(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 64, dtype=dtype)
    rms_norm(x, x[0], 1e-5)
    rotary(x.view(4, 4, 16), x[:, None, :16], x[:, None, :16])
    write_cache(x, torch.zeros(2, 16, 64, dtype=dtype), torch.arange(4))
    for activation in sorted({function: name for name, function in ACTIVATIONS.items()}.values()):
        act_and_mul(x, activation)


def quick() -> None:
    compile_for(80, 90)
    _small_ops(torch.bfloat16)
    compile_for(90)
    _attend(torch.bfloat16, (192, 128), 2, True)
    compile_for(80)  # what needs most shared memory, where there is least
    _attend(torch.float32, (256, 256), 2, False)


def thorough() -> None:
    compile_for(80, 90)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _small_ops(dtype)
        for sizes in ((64, 64), (128, 128), (256, 256), (192, 128), (80, 80)):
            for special in (False, True):
                _attend(dtype, sizes, 2, special)


if __name__ == "__main__":
    {"quick": quick, "thorough": thorough}[sys.argv[1]]()
