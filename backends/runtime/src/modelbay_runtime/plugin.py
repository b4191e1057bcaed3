"""What modelbay-runtime adds: the native backend, attention kinds, the reference kernels, the commands that run models.

Imports nothing heavy.
"""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import AttentionKindSpec, BackendSpec, CommandSpec, KernelSpec, QuantizationSpec

_DEVICES = ("cpu", "cuda")
_REFERENCE = {
    "rms_norm": "modelbay_runtime.kernels.ops:rms_norm",
    "rotary": "modelbay_runtime.kernels.ops:rotary",
    "rotary_interleaved": "modelbay_runtime.kernels.ops:rotary_interleaved",
    "act_and_mul": "modelbay_runtime.kernels.ops:act_and_mul",
    "write_cache": "modelbay_runtime.kernels.ops:write_cache",
    "linear": "modelbay_runtime.kernels.ops:Linear",
    "experts": "modelbay_runtime.kernels.experts:experts",
    "linear_blocks": "modelbay_runtime.kernels.blocks:linear_blocks",
    "experts_blocks": "modelbay_runtime.kernels.blocks:experts_blocks",
    "attention.full": "modelbay_runtime.kernels.attention:attention",
    "attention.sliding": "modelbay_runtime.kernels.attention:attention",
    "attention.encoder": "modelbay_runtime.kernels.encoder_attention:encoder_attention",
}
_CONSTRAINTS = dict.fromkeys(
    ("act_and_mul", "experts", "experts_blocks"), "modelbay_runtime.kernels.ops:knows_activation"
)


@hookimpl
def register_modeling_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="native",
            target="modelbay_runtime.native:NativeBackend",
            order=10,
            summary="a model class that a plugin registers",
        )
    ]


@hookimpl
def register_attention_kinds() -> list[AttentionKindSpec]:
    target = "modelbay_runtime.kernels.attention:attention"
    return [
        AttentionKindSpec(name="full", target=target, kv="modelbay_runtime.kv_spec:FullKV", summary="every token"),
        AttentionKindSpec(
            name="sliding", target=target, kv="modelbay_runtime.kv_spec:SlidingKV", summary="the last window of tokens"
        ),
        AttentionKindSpec(
            name="encoder",
            target="modelbay_runtime.kernels.encoder_attention:encoder_attention",
            kv="modelbay_runtime.kv_spec:NoKV",
            summary="every token of the sequence, both ways",
        ),
    ]


@hookimpl
def register_kernels() -> list[KernelSpec]:
    reference = [
        KernelSpec(set="torch", op=op, target=target, devices=_DEVICES, constraint=_CONSTRAINTS.get(op), priority=0)
        for op, target in _REFERENCE.items()
    ]
    few_rows = KernelSpec(
        set="cpu", op="rms_norm", target="modelbay_runtime.kernels.cpu:rms_norm", devices=("cpu",), priority=5
    )
    onednn = KernelSpec(
        set="onednn",
        op="linear",
        target="modelbay_runtime.kernels.onednn:Linear",
        devices=("cpu",),
        dtypes=("bfloat16", "float32"),
        constraint="modelbay_runtime.kernels.onednn:constraint",
        available="modelbay_runtime.kernels.onednn:available",
    )
    experts = KernelSpec(
        set="onednn",
        op="experts",
        target="modelbay_runtime.kernels.onednn:experts",
        devices=("cpu",),
        dtypes=("bfloat16", "float32"),
        constraint="modelbay_runtime.kernels.onednn:experts_constraint",
        available="modelbay_runtime.kernels.onednn:available",
    )
    return [*reference, few_rows, onednn, experts]


@hookimpl
def register_quantizations() -> list[QuantizationSpec]:
    return [
        QuantizationSpec(
            method="fp8",
            summary="blocks with a scale each",
            target="modelbay.weights.fp8:fp8_transforms",
            kept="modelbay.weights.fp8:fp8_blocks",
        )
    ]


@hookimpl
def register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(name="generate", target="modelbay_runtime.cli.generate:command", summary="Generate text."),
        CommandSpec(name="chat", target="modelbay_runtime.cli.chat:command", summary="Chat in the terminal."),
        CommandSpec(
            name="check", target="modelbay_runtime.cli.check:command", summary="Say whether a model would run here."
        ),
        CommandSpec(name="embed", target="modelbay_runtime.cli.embed:command", summary="Make vectors of texts."),
        CommandSpec(
            name="score", target="modelbay_runtime.cli.score:command", summary="Say how well documents answer a query."
        ),
        CommandSpec(name="plan", target="modelbay_runtime.cli.plan:command", summary="Say which rank would hold what."),
        CommandSpec(name="bench", target="modelbay_runtime.cli.bench:command", summary="Measure throughput."),
    ]
