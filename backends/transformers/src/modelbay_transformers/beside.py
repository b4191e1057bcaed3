"""What some language models are given for a token beside its embedding, as further columns of the embedding.

DeepStack adds features of an image to the hidden states after the first layers; others give each layer an input of its
own. A runner that puts rows of features in the place of rows of embeddings thereby puts all of it.

Legend: T tokens, F feature rows, H hidden size, N layers that get an input, D its size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_DEEPSTACK, _WHERE, _PER_LAYER = "deepstack_visual_embeds", "visual_pos_masks", "per_layer_inputs"


@dataclass(frozen=True, slots=True)
class Beside:
    """Columns are ``[embedding | deepstack levels, H each | per-layer inputs, N * D]``."""

    hidden_size: int
    deepstack: int = 0
    per_layer: tuple[int, int] | None = None

    @classmethod
    def of(cls, language_model: nn.Module, config: Any) -> Beside:
        """As the language model's signature and the config say."""
        takes = inspect.signature(language_model.forward).parameters
        text = config.get_text_config()
        levels, per_layer = 0, None
        if _DEEPSTACK in takes:
            vision = getattr(config, "vision_config", None)
            levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        size = getattr(text, "hidden_size_per_layer_input", None)
        if _PER_LAYER in takes and size:
            per_layer = (text.num_hidden_layers, size)
        return cls(text.hidden_size, levels, per_layer)

    @property
    def names(self) -> frozenset[str]:
        """The arguments that this stands for."""
        deepstack = {_DEEPSTACK, _WHERE} if self.deepstack else set()
        return frozenset(deepstack | ({_PER_LAYER} if self.per_layer else set()))

    def pack(self, arrived: dict[str, Any], places: torch.Tensor | None) -> torch.Tensor:
        """What arrived at the language model as rows; those in ``places`` [T] alone, if given."""
        embeds = arrived["inputs_embeds"][0]
        parts = [embeds]
        if self.deepstack:
            levels = arrived.get(_DEEPSTACK) or [None] * self.deepstack
            where = arrived.get(_WHERE)
            parts += [_spread(level, where, embeds) for level in levels]
        if self.per_layer:
            parts.append(arrived[_PER_LAYER][0].flatten(1).to(embeds.dtype))
        rows = torch.cat(parts, 1) if len(parts) > 1 else embeds
        return rows if places is None else rows[places]

    def unpack(self, rows: torch.Tensor) -> dict[str, Any]:
        """Rows as the language model's arguments."""
        size = self.hidden_size
        arguments: dict[str, Any] = {"inputs_embeds": rows[None, :, :size]}
        if self.deepstack:
            levels = rows[:, size : size * (1 + self.deepstack)].split(size, 1)
            arguments[_DEEPSTACK] = [level.contiguous() for level in levels]
            arguments[_WHERE] = torch.ones(1, rows.shape[0], dtype=torch.bool, device=rows.device)
        if self.per_layer:
            begin = size * (1 + self.deepstack)
            arguments[_PER_LAYER] = rows[None, :, begin:].unflatten(2, self.per_layer)
        return arguments


def _spread(level: torch.Tensor | None, where: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """One level's rows [F, H] in the places where they are added: [T, H], zero elsewhere."""
    rows = torch.zeros_like(like)
    if level is not None and where is not None:
        # [1, T], or [1, T, H] with all of a row alike.
        rows[where.reshape(len(like), -1)[:, 0]] = level.to(like.dtype)
    return rows
