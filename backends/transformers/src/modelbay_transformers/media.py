"""What a prompt with images or audio carries: items, their spans, and the positions that the model gives its tokens.

Legend: T tokens of the prompt, P rows of positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from modelbay.errors import BackendError, UsageError, one_line_with_type
from modelbay_runtime.multimodal.data import Media, MediaItem, MediaSpan
from modelbay_transformers.item_inputs import make_item

#: What models that number kinds of tokens call each of them.
TYPE_NUMBERS = {"image": 1, "audio": 3}
_TYPES = ("mm_token_type_ids", "token_type_ids")
_IDS = {
    "image": (
        "image_token_id",
        "image_token_index",
        "im_patch_id",
        "image_patch_token_id",
        "media_placeholder_token_id",
    ),
    "audio": ("audio_token_id", "audio_token_index"),
}

#: Model types whose prompts attend both ways as a whole, once there is an image.
PREFIX_TYPES = frozenset(("paligemma",))

#: (kind, the model's arguments for the item, where its span begins, the span's ids)
Piece = tuple[str, Mapping[str, torch.Tensor], int, Sequence[int]]


def placeholder_id(config: Any, kind: str) -> int | None:
    """The id that features of this kind replace, by the config."""
    for part in (config, config.get_text_config()):
        for name in _IDS[kind]:
            value = getattr(part, name, None)
            if isinstance(value, int):
                return value
    return None


def lay_out(model: Any, ids: Sequence[int], pieces: Sequence[Piece]) -> Media:
    """Items, spans and positions of one prompt.

    Args:
        model: an instance of Transformers' class; its parameters are not read.
        ids: [T], placeholders expanded.
    """
    if model.config.model_type in PREFIX_TYPES:
        return _lay_out_prefix(model, ids, pieces)
    both_ways = sees_both_ways(model)
    items: list[MediaItem] = []
    spans: list[MediaSpan] = []
    names = inspect.signature(model.forward).parameters
    for kind, inputs, start, span_ids in pieces:
        span = torch.tensor(list(span_ids))
        places = _places(span, model.config, kind)
        given = dict(inputs)
        for name in _TYPES:
            if name in names:
                given[name] = (places * TYPE_NUMBERS[kind])[None]
        items.append(make_item(kind, given, span, places, both_ways and kind == "image"))
        spans.append(
            MediaSpan(
                len(items) - 1, start, len(span_ids), None if bool(places.all()) else places.numpy(),
                bidirectional=both_ways and kind == "image",
            )
        )  # fmt: skip
    positions, delta = rope_positions(model, ids, pieces)
    return Media(items, spans, positions, delta)


def _lay_out_prefix(model: Any, ids: Sequence[int], pieces: Sequence[Piece]) -> Media:
    """The whole prompt attends both ways: one span, in whose places the image stands."""
    if len(pieces) > 1:
        raise UsageError(f"{type(model).__name__} takes one image in a prompt, got {len(pieces)}.")
    (kind, inputs, _, span_ids), tokens = pieces[0], torch.tensor(list(ids))
    places = _places(tokens, model.config, kind)
    span = torch.tensor(list(span_ids))
    given = {**inputs, "token_type_ids": torch.zeros(1, len(span), dtype=torch.long)}
    item = make_item(kind, given, span, _places(span, model.config, kind), both_ways=True)
    return Media([item], [MediaSpan(0, 0, len(ids), places.numpy(), bidirectional=True)])


def _places(ids: torch.Tensor, config: Any, kind: str) -> torch.Tensor:
    """Which ids features of this kind replace: bool, as ``ids``."""
    found = placeholder_id(config, kind)
    return torch.zeros_like(ids, dtype=torch.bool) if found is None else ids.eq(found)


def takes_argument(model: Any, name: str) -> bool:
    """Whether forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def sees_both_ways(model: Any) -> bool:
    """Whether the model's own code makes a mask in which tokens of an image see each other both ways."""
    module = inspect.getmodule(type(model))
    if not hasattr(module, "get_block_sequence_ids_for_mask"):
        return False
    text = model.config.get_text_config()
    if not hasattr(text, "use_bidirectional_attention") or isinstance(text.use_bidirectional_attention, bool):
        return True
    return bool(text.use_bidirectional_attention == "vision")


def rope_positions(model: Any, ids: Sequence[int], pieces: Sequence[Piece]) -> tuple[np.ndarray | None, int]:
    """[P, T] and what is added beyond, by the model's own ``get_rope_index``; (None, 0) if it has none."""
    function = getattr(model, "get_rope_index", None) or getattr(getattr(model, "model", None), "get_rope_index", None)
    if function is None:
        return None, 0
    names = inspect.signature(function).parameters
    tokens = torch.tensor([list(ids)])
    types = torch.zeros_like(tokens)
    for kind, _, start, span_ids in pieces:
        places = _places(tokens[:, start : start + len(span_ids)], model.config, kind)
        types[:, start : start + len(span_ids)] = places * TYPE_NUMBERS[kind]
    given: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    given |= dict.fromkeys(_TYPES, types)
    for name in dict.fromkeys(name for _, inputs, _, _ in pieces for name in inputs):
        given[name] = torch.cat([inputs[name] for _, inputs, _, _ in pieces if name in inputs])
    if "feature_attention_mask" in given:
        given["audio_seqlens"] = given["feature_attention_mask"].sum(-1)
    try:
        found = function(**{name: value for name, value in given.items() if name in names})
    except Exception as error:
        raise BackendError(f"{type(model).__name__}.get_rope_index raised {one_line_with_type(error)}") from error
    positions, deltas = found
    return positions[:, 0].numpy(), int(torch.as_tensor(deltas).reshape(-1)[0])
