"""The ops, their signatures, and their torch reference.

Every implementation in a kernel set has the signature that stands here. Legend: T tokens, N query heads, K kv heads,
D head size, E value head size, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019): ``x / rms(x) * weight``.

    Args:
        x: [T, H]. weight: [H]. eps: added to the mean square.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary position embedding (Su et al., 2021), in place, halves layout.

    Args:
        x: [T, N, D] (any strides, last dimension dense); the first ``R = cos.shape[-1]`` of D are turned.
        cos: [T, 1, R]. sin: [T, 1, R], its first half negated, so that
            ``x * cos + swap_halves(x) * sin`` is the rotation.
    """
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    turned.copy_(torch.addcmul(turned * cos, torch.roll(turned, size // 2, -1), sin))


def rotary_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary position embedding, in place, interleaved layout: dimensions 2i and 2i + 1 turn together.

    Args:
        x: [T, N, D] (any strides, last dimension dense); the first ``R = cos.shape[-1]`` of D are turned.
        cos: [T, 1, R]. sin: [T, 1, R], negated at even places, so that
            ``x * cos + swap_neighbours(x) * sin`` is the rotation.
    """
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned.copy_(torch.addcmul(turned * cos, swapped, sin))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def knows_activation(facts: Mapping[str, Any]) -> str | None:
    """The constraint of the reference: refused while the model is built, not at its first step."""
    name = facts.get("activation")
    return None if name in (None, *ACTIVATIONS) else f"it has no activation {name!r}, only {', '.join(ACTIVATIONS)}"


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Gated activation: [T, 2 I] -> [T, I], ``act(x[:, :I]) * x[:, I:]``."""
    half = x.shape[-1] // 2
    return ACTIVATIONS[activation](x[..., :half]).mul_(x[..., half:])


def write_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Put new rows into a paged cache.

    Args:
        rows: [T, row], any row stride. cache: [blocks, block_size, row]. slots: [T] int64.
    """
    cache.flatten(0, 1).index_copy_(0, slots, rows)


class Linear:
    """``y = x W^T + b (+ residual)``. `pack` turns a weight into the form that multiplies fastest.

    Attributes:
        repacks: `pack` returns a copy, and needs the weight no longer.
    """

    repacks = False

    @staticmethod
    def pack(weight: torch.Tensor) -> torch.Tensor:
        return weight

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [T, in]. weight: packed [out, in]. residual: [T, out], added to the product."""
        y = F.linear(x, weight, bias)
        return y if residual is None else y.add_(residual)
