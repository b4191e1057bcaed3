"""The memory behind the blocks: one tensor per layer of a group, and each layer's view of it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from modelbay_runtime.engine.kv_layout import CacheLayout


class KVCache:
    """``num_blocks`` pages.

    Args:
        layers: those that this rank has; all of the layout's, if not given.

    Attributes:
        views: layer index -> [blocks, block_size, row] (a state: [blocks, 1, size]), in the model's dtype.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Collection[int] | None = None,
    ) -> None:
        self.layout = layout
        self._num_blocks, self._dtype, self._device = num_blocks, dtype, device
        self._layers = None if layers is None else frozenset(layers)
        self.clear()

    def clear(self) -> None:
        """Zeros everywhere, in new tensors: on a CPU, pages that were never used still take no memory then."""
        layout, num_blocks = self.layout, self._num_blocks
        self.tensors: list[torch.Tensor] = []
        self.views: dict[int, torch.Tensor] = {}  # the old tensors are free before the new ones are made
        used = layout.tensors_of(self._layers)
        self.tensors = [_zeros(num_blocks * layout.page, self._dtype, self._device) for _ in used]
        tensor_of = dict(zip(used, self.tensors, strict=True))
        for group in layout.groups:
            for position, layer in enumerate(group.layers):
                if self._layers is not None and layer not in self._layers:
                    continue
                pages = tensor_of[position].view(num_blocks, -1)
                if group.block_size is None:
                    self.views[layer] = pages[:, : group.spec.per_sequence].unsqueeze(1)
                else:
                    rows = pages.view(num_blocks, group.block_size, group.row_stride)
                    self.views[layer] = rows[..., : group.spec.row]


def _zeros(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, so that a masked key is never NaN. On CPU through calloc: pages are not touched before they are used."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(elements * dtype.itemsize, np.uint8)).view(dtype)
    return torch.zeros(elements, dtype=dtype, device=device)
