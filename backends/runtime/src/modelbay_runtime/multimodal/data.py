"""What images and audio become between a request and the model.

Legend: T tokens of the prompt with placeholders expanded, F feature rows of one item, P rows of positions (3 for
M-RoPE), H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image or piece of audio, as the model's processor prepared it.

    Attributes:
        kind: "image" or "audio".
        digest: of the content and of what the processor was told; equal digests mean equal features.
        inputs: the model's arguments for this item alone (``pixel_values``, ``image_grid_thw`` …).
    """

    kind: str
    digest: bytes
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens ``start`` to ``start + length`` of the prompt stand for item number ``item``.

    Attributes:
        places: [length] bool, which of the tokens are replaced by feature rows, in order; None: all.
        bidirectional: whether its tokens attend to each other both ways (Gemma 3): then a step computes it whole.
    """

    item: int
    start: int
    length: int
    places: np.ndarray | None = None
    bidirectional: bool = False


@dataclass(slots=True)
class Media:
    """What a request with images or audio carries beside its token ids.

    Attributes:
        positions: [P, T] of the prompt's tokens, where they are not 0, 1, 2 …
        delta: added to a token's place to give its position beyond the prompt (in every row).
    """

    items: list[MediaItem]
    spans: list[MediaSpan]
    positions: np.ndarray | None = None
    delta: int = 0


class MultimodalModel(Protocol):
    """What a module offers beside the model contract (its class has ``media_kinds``)."""

    media_kinds: tuple[str, ...]

    def encode_media(self, item: MediaItem) -> torch.Tensor:
        """Feature rows of one item [F, H], on the model's device and in its dtype."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]: what ``inputs_embeds`` are for tokens."""
        ...


class MediaProcessor(Protocol):
    """The model's own processor. A modelling backend makes it, once, when the first request with media comes:
    ``backend.media_processor(resolution, tokenizer) -> MediaProcessor | None`` (None: the model takes text only).

    Attributes:
        sampling_rate: in Hz, of the audio it takes; None where it takes none. What has another rate is resampled before
            it comes here.
        chat_template: its own, where the tokenizer has none; None otherwise.
    """

    sampling_rate: int | None
    chat_template: str | None

    def __call__(
        self,
        prompt: str | list[int],
        images: list[Any],
        audios: list[tuple[np.ndarray, int]],
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], Media]:
        """Expand placeholders and prepare inputs.

        Args:
            images: PIL images, RGB, in the order of their placeholders. audios: (mono float32 samples, sampling rate in
                Hz), likewise.
            add_special_tokens: whether the tokenizer adds its own (BOS) to a text; off for one that a chat template
                wrote. Token ids are taken as they are, placeholders apart.

        Raises:
            UsageError: the number of placeholders differs from that of items, a kind that the model has not.
        """
        ...
