"""Feature rows of images and audio, kept by content, and put in the place of their tokens' embeddings.

Legend: T tokens of the step, F feature rows of one item, H hidden size.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from modelbay.errors import EngineError, one_line
from modelbay_runtime.multimodal.batch import BatchMedia, StepItem
from modelbay_runtime.multimodal.data import MultimodalModel

logger = logging.getLogger("modelbay")

#: Moves a host array to the device.
ToDevice = Callable[[Any], torch.Tensor]


class FeatureStore:
    """What the encoder made of each item, the least recently used first to go.

    Every rank sees the same batches in the same order, so that all keep and compute the same.

    Args:
        limit_bytes: kept beyond the step that is computed; the items of a step stay for that step, whatever they take.
        among_ranks: an item that cannot be encoded is NaN then, which ends its request where tokens are drawn. An
            error would leave the ranks apart, and end the model.
    """

    def __init__(self, model: MultimodalModel, limit_bytes: int, *, among_ranks: bool = False) -> None:
        self.model = model
        self.limit_bytes = limit_bytes
        self.among_ranks = among_ranks
        self.bytes = 0
        self._epoch = 0
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def embeds(self, input_ids: torch.Tensor, media: BatchMedia, to_device: ToDevice) -> torch.Tensor:
        """[T] ids -> [T, H] embeddings, with feature rows in their places.

        Raises:
            EngineError: an item that cannot be encoded, with its requests; not among ranks.
        """
        if media.epoch != self._epoch:
            self._kept.clear()
            self.bytes, self._epoch = 0, media.epoch
        features = [self._features(item, input_ids.device) for item in media.items]
        self._shrink()
        rows = to_device(media.rows)
        # A placeholder's id need not be one that the embedding has.
        embeds: torch.Tensor = self.model.embed(input_ids.index_fill(0, rows, 0)).clone()
        for number, found in enumerate(features):
            mine = media.item_of == number
            part = found.index_select(0, to_device(media.feature_of[mine]))
            embeds.index_copy_(0, to_device(media.rows[mine]), part.to(embeds.dtype).expand(-1, embeds.shape[1]))
        return embeds

    def _features(self, wanted: StepItem, device: torch.device) -> torch.Tensor:
        """[F, H], computed once; [F, 1] of NaN for what cannot be encoded among ranks."""
        item = wanted.item
        found = self._kept.get(item.digest)
        if found is None:
            try:
                found = self._encode(wanted)
            except EngineError as error:
                if not self.among_ranks:
                    raise
                logger.warning("%s", error)
                found = torch.full((wanted.rows, 1), torch.nan, device=device)
            self._kept[item.digest] = found
            self.bytes += found.nbytes
        self._kept.move_to_end(item.digest)
        return found

    def _encode(self, wanted: StepItem) -> torch.Tensor:
        item, requests = wanted.item, ", ".join(map(repr, wanted.requests))
        try:
            found: torch.Tensor = self.model.encode_media(item)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise EngineError(
                f"request {requests}: its {item.kind} cannot be encoded: {one_line(error)}.",
                request_ids=wanted.requests,
            ) from error
        if found.shape[0] != wanted.rows:
            raise EngineError(
                f"request {requests}: the encoder made {found.shape[0]} rows of its {item.kind}, and the prompt has "
                f"{wanted.rows} tokens for them.",
                hint="Processor and model do not belong together.",
                request_ids=wanted.requests,
            )
        return found

    def _shrink(self) -> None:
        while self.bytes > self.limit_bytes:
            _, gone = self._kept.popitem(last=False)
            self.bytes -= gone.nbytes
