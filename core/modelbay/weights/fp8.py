"""Checkpoints in 8-bit floating point with a scale for each block of a weight, as ``quant_method`` "fp8" says."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Weights that a layer holds in 8 bits, with a scale for each block of ``block`` rows and columns.

    Args:
        dtype: torch's name. suffix: of the parameter of scales, behind the weight's own name.
        skipped: modules that were not quantised, by a name, its beginning or its end.
    """

    dtype: str
    block: tuple[int, int]
    suffix: str = "_scale_inv"
    skipped: tuple[str, ...] = ()

    def skips(self, name: str) -> bool:
        return any(
            name == skipped or name.startswith(f"{skipped}.") or name.endswith(f".{skipped}")
            for skipped in self.skipped
        )


_DTYPES = {None: "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def fp8_blocks(config: ModelConfig) -> BlockScales:
    """What layers hold if the weights stay as they are on disk.

    Raises:
        ConfigError: the scales are not those of blocks, or the kind of float is not known.
    """
    said = config.quantization or {}
    [transform] = fp8_transforms(config)
    if said.get("fmt") not in _DTYPES:
        known = ", ".join(name for name in _DTYPES if name)
        raise ConfigError(f"quantization_config of method 'fp8' has fmt {said['fmt']!r}; known are {known}.")
    skipped = tuple(map(str, said.get("modules_to_not_convert") or said.get("ignored_layers") or ()))
    return BlockScales(_DTYPES[said.get("fmt")], transform.block, skipped=skipped)


#: Of tensors of scales, those that the model itself applies.
Kept = Callable[[Collection[str]], Collection[str]]


def dequantise(
    transform: Dequantise,
    pattern: re.Pattern[str],
    pieces: Iterable[Piece],
    entries: Mapping[str, TensorEntry],
    kept: Kept = lambda names: (),
) -> list[Piece]:
    """Pieces as they are on disk, with those that it is for scaled and their scales used up.

    Raises:
        WeightsError: a tensor's scales are absent, or not one for each block.
    """
    pieces = list(pieces)
    scale_of: dict[str, str] = {}
    for piece in pieces:
        if entries[piece.source].dtype in transform.dtypes and pattern.search(piece.name):
            scale_of[piece.source] = scale = pattern.sub(transform.scale, piece.name)
            _check_scales(transform, piece, scale, entries)
    used = set(scale_of.values()) - set(kept(scale_of.values()))
    results = []
    for piece in pieces:
        scale = scale_of.get(piece.source, "")
        if scale in used:
            piece = piece.then(Scale(scale, transform.block))
        if piece.source not in used:
            results.append(piece)
    return results


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
