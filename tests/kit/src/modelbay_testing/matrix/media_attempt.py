"""Try one architecture that reads images or audio: tiny, with random inputs, compared with Transformers' own forward.

The batch mixes text alone, one item, and two items with text between and around them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelbay_testing.logits import worst_difference
from modelbay_testing.matrix.attempt import Outcome, judged, refusal, said_by
from modelbay_testing.matrix.cases import Case
from modelbay_testing.matrix.media_configs import media_config, media_reference
from modelbay_testing.matrix.media_inputs import Inputs, item_inputs
from modelbay_testing.matrix.media_run import MediaRequest, MediaRunner
from modelbay_testing.tiny_configs import FIRST_MEDIA_ID

OUTPUT_TOKENS = 16
#: Models whose prompts have one image, at their beginning, and attend both ways as a whole.
ONE_ITEM = ("paligemma",)


class Unserved(Exception):
    """Text is served, images and audio are refused."""


def attempt_media(case: Case, folder: Path) -> Outcome:
    """Try a case in ``folder``; never raises for what a model does."""
    from modelbay_transformers.refusals import MEDIA_REFUSED

    facts = (case.task, case.model_type, case.architecture)
    try:
        config, tiny = _config(case)
        config.save_pretrained(folder)
        refused = refusal(folder, Case("generate", *facts[1:]))
        if refused is not None:
            return Outcome(*facts, "refused", refused)
        if not tiny and case.model_type in MEDIA_REFUSED:
            return Outcome(*facts, "refused", MEDIA_REFUSED[case.model_type])
        if not tiny:
            return Outcome(*facts, "fails", "it builds, and no tiny copy of it can be made to compare it with")
        reference = media_reference(config, case.architecture)
        difference, scale, note = _compare(config, reference, case, folder)
        return judged(facts, difference, scale, note)
    except Unserved as refusal_of_media:
        return Outcome(*facts, "refused", str(refusal_of_media))
    except Exception as error:
        return Outcome(*facts, "fails", said_by(error))


def _config(case: Case) -> tuple[Any, bool]:
    """The tiny config, or the class's own default where it cannot be made small by rule."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return media_config(case), True
    except Exception:
        config = CONFIG_MAPPING[case.model_type]()
        config.architectures = [case.architecture]
        return config, False


def _compare(config: Any, reference: Any, case: Case, folder: Path) -> tuple[float, float, str]:
    from modelbay.resolve import resolve
    from modelbay_runtime.build import build_model
    from modelbay_runtime.loading import load_weights

    reference.save_pretrained(folder)
    config.save_pretrained(folder)
    resolution = resolve(str(folder), dtype="float32", model_impl="transformers", runner="generate", max_model_len=512)
    built = build_model(resolution)
    load_weights(built.module, resolution, device="cpu", dtype=torch.float32)
    kinds = getattr(built.module, "media_kinds", ())
    if not kinds:
        raise Unserved(getattr(built.module, "media_refusal", None) or "its class takes text alone")
    found = [(kind, *next(item_inputs(reference, config, kind), (None, [], []))) for kind in kinds]
    usable = [(kind, form, inputs, rows) for kind, form, inputs, rows in found if inputs]
    if not usable:
        raise ValueError(f"no inputs could be made for {' and '.join(kinds)}")
    requests, given = _requests(config, reference, usable)
    MediaRunner(built.module, built.kv_specs, requests, OUTPUT_TOKENS, FIRST_MEDIA_ID).run()
    worst, scale = 0.0, 0.0
    for request, inputs in zip(requests, given, strict=True):
        expected = _reference_logits(reference, config, request, inputs)
        worst = max(worst, worst_difference([torch.stack(request.logits)], [expected]))
        scale = max(scale, expected.abs().max().item())
    return worst, scale, ", ".join(form.__name__ for _, form, _, _ in usable)


def _requests(config: Any, reference: Any, usable: Any) -> tuple[list[MediaRequest], list[list[tuple[str, Inputs]]]]:
    """Requests and, of each, its items as (kind, inputs)."""
    generator = torch.Generator().manual_seed(1)

    def text(n: int) -> list[int]:
        return torch.randint(3, FIRST_MEDIA_ID, (n,), generator=generator).tolist()

    def one(parts: Sequence[Any]) -> tuple[MediaRequest, list[tuple[str, Inputs]]]:
        from modelbay_transformers.media import lay_out

        ids, items = [], []
        for part in parts:
            if isinstance(part, list):
                ids += part
            else:
                kind, inputs, rows = part
                span = [placeholder(config, kind)] * len(rows)
                before, after = bounds(config, kind)
                ids += before
                items.append((kind, inputs, len(ids), span))
                ids += [*span, *after]
        media = lay_out(reference, ids, items) if items else None
        return MediaRequest(ids, media), [(kind, inputs) for kind, inputs, _, _ in items]

    alone = config.model_type not in ONE_ITEM and not _needs_media(reference)
    plans: list[list[Any]] = [[text(5)], [text(21)]] if alone else []
    for kind, _, inputs, rows in usable:
        plans.append([text(4), (kind, inputs[0], rows[0]), text(7)])
        if config.model_type in ONE_ITEM:
            plans.append([(kind, inputs[1], rows[1]), text(5)])
            continue
        plans.append([text(3), (kind, inputs[1], rows[1]), text(2), (kind, inputs[0], rows[0]), text(5)])
    pairs = [one(plan) for plan in plans]
    return [request for request, _ in pairs], [items for _, items in pairs]


def _needs_media(model: Any) -> bool:
    """Whether Transformers' class does not run on text alone."""
    parameters = inspect.signature(model.forward).parameters
    return "pixel_values" in parameters and parameters["pixel_values"].default is inspect.Parameter.empty


def bounds(config: Any, kind: str) -> tuple[list[int], list[int]]:
    """Ids that a prompt has before and after an item, where the model's positions are counted from them."""
    word = {"image": "vision", "audio": "audio"}[kind]
    ids = [getattr(config, f"{word}_{side}_token_id", None) for side in ("start", "end")]
    return tuple([] if value is None else [value] for value in ids)  # type: ignore[return-value]


def placeholder(config: Any, kind: str) -> int:
    from modelbay_transformers.media import placeholder_id

    found = placeholder_id(config, kind)
    assert found is not None, f"the config says no id of a placeholder for {kind}"
    return found


def _reference_logits(model: Any, config: Any, request: MediaRequest, items: list[tuple[str, Inputs]]) -> torch.Tensor:
    """[T + O - 1, V] of Transformers for the whole sequence."""
    ids = torch.tensor([[*request.ids, *request.output[:-1]]])
    names = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, inputs in items for name in inputs):
        nested = name in ("pixel_values", "pixel_attention_mask") and items[0][1]["pixel_values"].ndim == 5
        dim = 1 if nested and "pixel_attention_mask" in items[0][1] else 0  # [1, images, …]
        given[name] = torch.cat([inputs[name] for _, inputs in items if name in inputs], dim)
    if request.media:
        types = torch.zeros_like(ids)
        for kind, number in (("image", 1), ("audio", 3)):
            types[ids == _id_or_none(config, kind)] = number
        if config.model_type in ONE_ITEM:  # a prefix, and what follows
            types = (torch.arange(ids.shape[1]) >= len(request.ids)).long()[None]
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in names:
                given[name] = types
    if items and "audio_seqlens" in inspect.signature(getattr(model, "get_rope_index", placeholder)).parameters:
        given["position_ids"] = _rope_index(model, ids, given)  # its forward alone does not, `generate` does
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False, **given).logits[0].float()


def _rope_index(model: Any, ids: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    mask = given.get("feature_attention_mask")
    positions: torch.Tensor = model.get_rope_index(
        ids,
        image_grid_thw=given.get("image_grid_thw"),
        attention_mask=torch.ones_like(ids),
        audio_seqlens=None if mask is None else mask.sum(-1),
    )[0]
    return positions


def _id_or_none(config: Any, kind: str) -> int:
    from modelbay_transformers.media import placeholder_id

    found = placeholder_id(config, kind)
    return -1 if found is None else found
