"""Weights that stay in 8 bits: whether a model's do, and which of its layers hold them so.

Layers that can say so by a method ``hold_blocks(build, blocks)``. What no layer holds is dequantised while it streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from modelbay.resolve import Resolution
from modelbay.specs import load_target
from modelbay.weights.fp8 import BlockScales
from modelbay_runtime.kernels.table import REFERENCE
from modelbay_runtime.layout import said

if TYPE_CHECKING:
    from modelbay_runtime.api import BuildContext

_OPS = ("linear_blocks", "experts_blocks")


def keep_quantised(module: nn.Module, resolution: Resolution, build: BuildContext) -> None:
    """Let the layers of a module on meta hold quantised weights as they are, if that is wanted or pays.

    ``quantization=METHOD`` wants it. Where nobody says so, it pays if a kernel set multiplies such weights on this
    device; the reference, which brings them to another dtype at every step, is there for those who lack the memory.
    """
    method = resolution.config.quantization.get("quant_method") if resolution.config.quantization else None
    owned = resolution.plugins.get("quantizations", method) if isinstance(method, str) else None
    if owned is None or owned.value.kept is None:
        return
    blocks: BlockScales = load_target(owned.value.kept)(resolution.config)
    asked = resolution.args.quantization == method
    layers = list(_layers(module, blocks))
    reason = _why_not(layers, build, str(method), asked)
    if reason is not None:
        answer, source = f"dequantised to {resolution.config.dtype} while streaming", reason
        (resolution.trace.warn if asked else resolution.trace.decide)("build", "quantised weights", answer, source)
        return
    for layer in layers:
        layer.hold_blocks(build, blocks)
    rows, columns = blocks.block
    answer = f"kept in {blocks.dtype}, blocks of {rows} × {columns} scaled in the product, in {len(layers)} layers"
    source = f"quantization={method}" if asked else "a kernel set multiplies them here"
    resolution.trace.decide("build", "quantised weights", answer, source)


def is_scale(holders: Iterable[tuple[nn.Module, str]]) -> bool:
    """Whether a parameter, by its modules and its name in each, holds the scales of another's blocks."""
    return any(name in said(module, "scale_parameters", ()) for module, name in holders)


def counted(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that are one, without the scales of others."""
    for layer in module.modules():
        yield from (p for name, p in layer._parameters.items() if p is not None and not is_scale([(layer, name)]))


def _layers(module: nn.Module, blocks: BlockScales) -> Iterator[Any]:
    for path, layer in module.named_modules():
        if callable(getattr(layer, "hold_blocks", None)) and not any(map(blocks.skips, _names(path, layer))):
            yield layer


def _names(path: str, layer: nn.Module) -> Iterator[str]:
    """What a checkpoint calls it: by its own name, and by those of what it packs."""
    yield path
    for section in getattr(layer, "packed", ()):
        yield ".".join(filter(None, (path.rpartition(".")[0], section.name)))


def _why_not(layers: list[Any], build: BuildContext, method: str, asked: bool) -> str | None:
    if not layers:
        return "no layer of the module can hold them"
    if asked:
        return None
    slow = [op for op in _OPS if build.kernels.would_choose(op, {"activation": None}) == REFERENCE]
    if not slow:
        return None
    return (
        f"no kernel set multiplies them on {build.device.type}; quantization={method} keeps them, at the cost of time"
    )
