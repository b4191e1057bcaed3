"""The inputs of one image or sound, apart from those of its neighbours.

Beside the model's own arguments an item holds three of ours, so that it can be encoded without its prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from modelbay_runtime.multimodal.data import MediaItem

#: Keys of `MediaItem.inputs` that are no arguments of the model: [L] ids of the item's span, [L] bool, which of them
#: features replace, and whether they see each other both ways.
IDS, PLACES, BOTH_WAYS = "span_ids", "span_places", "span_both_ways"
OWN = (IDS, PLACES, BOTH_WAYS)


def make_item(
    kind: str,
    inputs: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    places: torch.Tensor | None = None,
    both_ways: bool = False,
) -> MediaItem:
    """An item with its digest.

    Args:
        inputs: the model's arguments for it alone.
        ids: [L] of its span. places: [L] bool; None: all.
    """
    places = torch.ones(len(ids), dtype=torch.bool) if places is None else places
    whole = {**inputs, IDS: ids, PLACES: places, BOTH_WAYS: torch.tensor(both_ways)}
    return MediaItem(kind, _digest(kind, whole), whole)


def _digest(kind: str, inputs: Mapping[str, torch.Tensor]) -> bytes:
    found = hashlib.sha256(kind.encode())
    for name in sorted(inputs):
        value = inputs[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return found.digest()
