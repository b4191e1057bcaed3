"""The torch reference of products with weights in 8 bits that have a scale for each block.

A weight is brought to the activations' dtype a few rows of blocks at a time, so that it takes one byte per element, and
a tile besides. Legend: T tokens, E experts, H hidden size, I intermediate size, b × c rows and columns of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from modelbay_runtime.kernels.experts import grouped
from modelbay_runtime.kernels.ops import act_and_mul

Block = tuple[int, int]

#: Elements that are brought to another dtype at a time.
_TILE = 1 << 18


def linear_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block: Block,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``y = x W^T + b (+ residual)``, each block of W times its scale; equal to the product with W dequantised.

    Args:
        x: [T, in] (any leading dimensions). weight: [out, in] in 8 bits. scales: [ceil(out / b), ceil(in / c)] float32.
        block: (b, c). bias: [out]. residual: [T, out].
    """
    rows = block[0]
    at_once = max(1, _TILE // (rows * weight.shape[1])) * rows
    if at_once >= weight.shape[0]:
        y = F.linear(x, dequantised(weight, scales, block, x.dtype), bias)
    else:
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        for first in range(0, weight.shape[0], at_once):
            tile = weight[first : first + at_once]
            own = scales[first // rows : first // rows + -(-tile.shape[0] // rows)]
            y[..., first : first + at_once] = F.linear(x, dequantised(tile, own, block, x.dtype))
        if bias is not None:
            y += bias
    return y if residual is None else y.add_(residual)


def experts_blocks(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_block: Block,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_block: Block,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """`modelbay_runtime.kernels.experts.experts` with weights in 8 bits.

    Args:
        gate_up: [E, 2 I, H]; its scales: [E, ceil(2 I / b), ceil(H / c)]. down: [E, H, I]; its scales accordingly.
    """

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        both = linear_blocks(rows, gate_up[number], gate_up_scales[number], gate_up_block)
        return linear_blocks(act_and_mul(both, activation), down[number], down_scales[number], down_block)

    return grouped(x, ids, weights, gate_up.shape[0], expert)


def dequantised(weight: torch.Tensor, scales: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] in 8 bits times its blocks' scales, rounded to ``dtype`` once."""
    rows, columns = block
    values = _float32(weight)
    wide = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    whole = weight.shape[0] // rows * rows
    values[:whole].unflatten(0, (-1, rows)).mul_(wide[: whole // rows, None])
    if whole < weight.shape[0]:
        values[whole:] *= wide[-1]
    return values.to(dtype)


def _float32(weight: torch.Tensor) -> torch.Tensor:
    """A copy. On CPU by a table of all 256 values, which takes a tenth of the time that torch's conversion does."""
    if weight.device.type != "cpu":
        return weight.float()
    table = torch.arange(256, dtype=torch.uint8).view(weight.dtype).float()
    return table.index_select(0, weight.view(torch.uint8).flatten().int()).view(weight.shape)
