"""Checkpoints in 8-bit floating point with a scale for each block of a weight, as ``quant_method`` "fp8" says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from modelbay.errors import ConfigError, WeightsError
from modelbay.weights.formats import TensorEntry
from modelbay.weights.pieces import Piece, Scale
from modelbay.weights.transforms import Dequantise

if TYPE_CHECKING:
    from modelbay.config import ModelConfig


def fp8_transforms(config: ModelConfig) -> tuple[Dequantise, ...]:
    """Every weight in 8 bits times its ``weight_scale_inv``; what was left unquantised stays as it is.

    Raises:
        ConfigError: the scales are not those of blocks.
    """
    said = config.quantization or {}
    block = said.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ConfigError(
            f"quantization_config of method 'fp8' has weight_block_size {block!r}; two sizes, rows and columns of the "
            "block that shares a scale, are needed. Scales for a whole tensor or channel are not supported.",
        )
    return (Dequantise(r"weight$", "weight_scale_inv", (block[0], block[1])),)


def dequantise(
    transform: Dequantise, pattern: re.Pattern[str], pieces: Iterable[Piece], entries: Mapping[str, TensorEntry]
) -> list[Piece]:
    """Pieces as they are on disk, with those that it is for scaled and their scales used up.

    Raises:
        WeightsError: a tensor's scales are absent, or not one for each block.
    """
    results, used = [], set()
    for piece in pieces:
        if entries[piece.source].dtype in transform.dtypes and pattern.search(piece.name):
            scale = pattern.sub(transform.scale, piece.name)
            _check_scales(transform, piece, scale, entries)
            used.add(scale)
            piece = piece.then(Scale(scale, transform.block))
        results.append(piece)
    return [piece for piece in results if piece.source not in used]


def _check_scales(transform: Dequantise, piece: Piece, scale: str, entries: Mapping[str, TensorEntry]) -> None:
    dtype = entries[piece.source].dtype
    if scale not in entries:
        raise WeightsError(
            f"{piece.source} is {dtype}, and the tensor of its scales, {scale}, is absent.",
            hint="The checkpoint is incomplete, or quantised in another way than its quantization_config says.",
        )
    if len(piece.shape) != 2:
        raise WeightsError(
            f"{piece.source} is {dtype} of shape {list(piece.shape)}; scaled blocks have two dimensions."
        )
    wanted = tuple(-(-size // block) for size, block in zip(piece.shape, transform.block, strict=True))
    found = entries[scale]
    if found.shape != wanted or "float" not in found.dtype:
        rows, columns = transform.block
        raise WeightsError(
            f"{scale} is {found.dtype} {list(found.shape)}; {piece.source} {list(piece.shape)} in blocks of "
            f"{rows} × {columns} needs floating-point scales {list(wanted)}."
        )
