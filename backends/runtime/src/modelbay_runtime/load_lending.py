"""Memory for weights that are needed only until their module has repacked them: lent, taken back, lent again.

New memory costs as much time as what is written to it, since the system hands it out page by page, zeroed. Layers have
the same shapes, so what one has read its weights from serves the next.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from modelbay.errors import PluginError
from modelbay_runtime.layout import said
from modelbay_runtime.load_targets import Storage


def is_lent(storage: Storage) -> bool:
    """Whether one module alone holds it, and says that its ``post_load`` puts a copy in its place."""
    if storage.buffer or len(storage.holders) != 1:
        return False
    [(module, attribute)] = storage.holders
    return attribute in said(module, "repacked", ()) and callable(said(module, "post_load"))


class Lending:
    """The memory that is out, and what has come back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}
        self._out: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def lend(self, storage: Storage) -> torch.Tensor:
        """Memory in the shape and dtype of ``storage``, which holds it from now on. Its content is whatever it was."""
        free = self._free.setdefault(storage.nbytes, [])
        memory = free.pop() if free else torch.empty(storage.nbytes, dtype=torch.uint8, device=self._device)
        values = memory.view(storage.dtype).view(storage.shape)
        storage.hold(values)
        self._out[id(storage)] = values, memory
        return values

    def pass_on(self, storage: Storage, values: torch.Tensor) -> None:
        """Let ``storage`` hold ``values``, which are valid only until the next tensor is read."""
        storage.hold(values)
        self._out[id(storage)] = values, None

    def is_passed_on(self, storage: Storage) -> bool:
        values, memory = self._out.get(id(storage), (None, None))
        return values is not None and memory is None

    def take_back(self, storages: Iterable[Storage]) -> None:
        """After ``post_load`` of the module that holds them: what of it was lent.

        Raises:
            PluginError: the module has kept one.
        """
        for storage in storages:
            values, memory = self._out.pop(id(storage), (None, None))
            if values is None:
                continue
            for module, attribute in storage.holders:
                kept = module._parameters.get(attribute)
                if kept is not None and _is_same_memory(kept.data, values):
                    raise PluginError(
                        f"{type(module).__name__}.post_load keeps {storage.name}, which its 'repacked' denies.",
                        hint="A kernel whose 'repacks' is true must return a copy from 'pack'.",
                    )
            if memory is not None:
                self._free[storage.nbytes].append(memory)


def _is_same_memory(kept: torch.Tensor, lent: torch.Tensor) -> bool:
    """Forms of other layouts, and of tensor classes of their own, are copies."""
    plain = type(kept) is torch.Tensor and kept.layout == torch.strided
    return plain and lent.numel() > 0 and kept.untyped_storage().data_ptr() == lent.untyped_storage().data_ptr()
