"""From a Resolution to a module on meta: device, dtype, kernels, plan. `explain` ends here; weights come after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from modelbay.errors import UsageError
from modelbay.resolve import Resolution
from modelbay.specs import load_target
from modelbay_runtime.api import BuildContext, KVSpec
from modelbay_runtime.kernels.table import KernelTable
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.sizes import check_mesh
from modelbay_runtime.quantised import counted, keep_quantised
from modelbay_runtime.speculation import check_drafts, draft_tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A module whose parameters are on meta, with what it was built from and what it will keep per token."""

    module: Any
    context: BuildContext
    kv_specs: dict[int, KVSpec]

    @property
    def max_model_len(self) -> int:
        """The config's limit, or that of a module which has positions for fewer tokens (``max_positions``)."""
        limit: int | None = getattr(self.module, "max_positions", None)
        return min(self.context.max_model_len, limit) if limit else self.context.max_model_len

    def parameter_bytes(self) -> int:
        """Bytes of the parameters on this rank; a tied head counts once."""
        tied = {id(m.weight) for m in self.module.modules() if getattr(m, "tied_to", None)}
        return sum(p.numel() * p.element_size() for p in self.module.parameters() if id(p) not in tied)

    def copied_bytes(self) -> int:
        """Bytes of the packed copies that tied heads get beside the embedding, which is looked up in its own form."""
        total = 0
        for module in self.module.modules():
            pack = getattr(getattr(module, "kernel", None), "pack", None)
            if pack is None or not getattr(module, "tied_to", None):
                continue
            weight: torch.Tensor = module.weight
            sample = torch.zeros(64, 64, dtype=weight.dtype, device=self.context.device)
            if pack(sample) is not sample:
                total += weight.numel() * weight.element_size()
        return total


def pick_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, else the CPU.

    Raises:
        UsageError: a device that this torch or this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not a torch device: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name!r} was asked for, and torch sees no CUDA device. Use --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported; cpu and cuda are.")
    return device


def build_model(resolution: Resolution, parallel: ParallelContext | None = None) -> BuiltModel:
    """Build on meta, negotiate kernels, and write every decision to the resolution's trace.

    Args:
        parallel: this process's place; if not given, the place of the first rank of the mesh that the arguments ask
            for, alone: such a module can be looked at, and not run.

    Raises:
        UsageError: a parallel size, device, dtype or kernel set that cannot be had.
        BackendError: the model class raised.
    """
    args, config, trace = resolution.args, resolution.config, resolution.trace
    parallel = parallel or ParallelContext.apart(Mesh.of(args), Mesh.of(args).place(0))
    check_mesh(config, parallel.mesh)
    device = pick_device(args.device)
    source = trace.argument("device") if args.device != "auto" else "what torch sees"
    trace.decide("build", "device", str(device), source)
    dtype = DTYPES.get(config.dtype)
    if dtype is None:
        raise UsageError(f"dtype {config.dtype!r} is not supported; supported: {', '.join(DTYPES)}.")
    table = KernelTable(resolution.plugins, device, dtype, args.kernels, args.attention_backend)
    drafts = draft_tokens(args)
    context = BuildContext(config, dtype, device, table, parallel, config.max_model_len, draft_tokens=drafts)
    owned = resolution.plugins.require("modeling_backends", resolution.backend, "model_impl")
    module = load_target(owned.value.target)().build(resolution, context)
    keep_quantised(module, resolution, context)
    check_drafts(module, resolution, context)
    built = BuiltModel(module, context, dict(module.kv_specs()))
    trace.decide("build", "parameters", f"{_count(module):,} ({built.parameter_bytes():,} bytes)", "module on meta")
    _check_backbones(built, resolution)
    _check_length(built, resolution)
    kinds: dict[KVSpec, int] = {}
    for spec in built.kv_specs.values():
        kinds[spec] = kinds.get(spec, 0) + 1
    for spec, layers in kinds.items():
        per_token = spec.row * dtype.itemsize * layers
        trace.decide("build", "cache", f"{spec} × {layers} layers: {per_token:,} bytes per token", "module on meta")
    whole = "1 (every parameter whole)" if parallel.mesh.size == 1 else str(parallel.mesh)
    trace.decide("plan", "ranks", whole, "argument")
    table.report(trace)
    return built


def _check_backbones(built: BuiltModel, resolution: Resolution) -> None:
    """A module whose backbones are all of one dtype has not kept each one's own (C8)."""
    own = {dtype for path, dtype in resolution.config.backbone_dtypes.items() if path}
    found = {str(parameter.dtype).removeprefix("torch.") for parameter in built.module.parameters()}
    if own - found:
        raise UsageError(
            f"dtype=backbone: the config's backbones are in {', '.join(sorted(own))}, and backend "
            f"{resolution.backend!r} builds {resolution.architecture} in {', '.join(sorted(found))}.",
            hint="Use dtype=auto.",
        )


def _check_length(built: BuiltModel, resolution: Resolution) -> None:
    """Only the module knows how many tokens it has positions for, where its table has rows for something else."""
    if built.max_model_len == built.context.max_model_len:
        return
    if resolution.args.max_model_len is not None:
        raise UsageError(
            f"max_model_len {resolution.args.max_model_len} is more than the model's {built.max_model_len}: "
            "the other rows of its position table are not for tokens.",
            hint="Lower it.",
        )
    resolution.trace.decide("build", "max_model_len", built.max_model_len, "positions that the module has for tokens")


def _count(module: torch.nn.Module) -> int:
    tied = {id(m.weight) for m in module.modules() if getattr(m, "tied_to", None)}
    return sum(p.numel() for p in {id(p): p for p in counted(module)}.values() if id(p) not in tied)
