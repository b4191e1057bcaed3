"""Random inputs of tiny models for one image or sound: shapes that Transformers' processors give, tried in turn.

Most families take one of a few forms. Which one a model takes shows when its own code runs with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]
#: (config, generator, number of the item) -> inputs of the item.
Form = Callable[[Any, torch.Generator, int], Inputs]


def vision_of(config: Any) -> Any:
    """The config that says sizes of images."""
    for name in ("vision_config", "vision_tower_config", "vision_model_config", "vq_config"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config


def _size(config: Any) -> int:
    vision = vision_of(config)
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 56
    return size[0] if isinstance(size, (list, tuple)) else int(size)


def plain(config: Any, generator: torch.Generator, number: int) -> Inputs:
    size = _size(config)
    channels = getattr(vision_of(config), "num_channels", None) or getattr(vision_of(config), "in_channels", None) or 3
    return {"pixel_values": torch.randn(1, channels, size, size, generator=generator)}


def with_sizes(config: Any, generator: torch.Generator, number: int) -> Inputs:
    inputs = plain(config, generator, number)
    return {**inputs, "image_sizes": torch.tensor([inputs["pixel_values"].shape[-2:]])}


def tiles(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """The image as a whole and its parts: LLaVA-next."""
    size = _size(config)
    rows, columns = ((1, 2), (2, 1))[number % 2]
    pixels = torch.randn(1, 1 + rows * columns, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[rows * size, columns * size]])}


def several(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """[1, images, …]: the Idefics family."""
    inputs = plain(config, generator, number)["pixel_values"]
    pixels = torch.cat([inputs, torch.randn(inputs.shape, generator=generator)])[None]
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": torch.ones(pixels.shape[:2] + pixels.shape[3:], dtype=torch.bool),
    }


def patches(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """[patches, values of one] and a grid: the Qwen2-VL family."""
    vision = vision_of(config)
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 2
    height, width = ((2, 3), (3, 2))[number % 2]
    grid = (1, height * merge, width * merge)
    patch = vision.patch_size
    time = getattr(vision, "temporal_patch_size", None) or 1
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    pixels = torch.randn(grid[1] * grid[2], channels * time * patch * patch, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}


def square_patches(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """[patches, channels, P, P] and a grid."""
    inputs = patches(config, generator, number)
    patch = vision_of(config).patch_size
    return {**inputs, "pixel_values": inputs["pixel_values"].view(len(inputs["pixel_values"]), -1, patch, patch)}


def spectrum(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """[1, mel bins, frames]: Whisper's features, as long as its encoder takes."""
    audio = config.audio_config
    bins = getattr(audio, "num_mel_bins", None) or getattr(audio, "mel_bins", None) or 80
    frames = 2 * (getattr(audio, "max_source_positions", None) or 50)
    return {"input_features": torch.randn(1, bins, frames, generator=generator)}


def masked_spectrum(config: Any, generator: torch.Generator, number: int) -> Inputs:
    inputs = spectrum(config, generator, number)
    mask = torch.ones(1, inputs["input_features"].shape[-1], dtype=torch.long)
    mask[:, -8 * (1 + number) :] = 0
    return {**inputs, "feature_attention_mask": mask}


def masked_spectrum_2(config: Any, generator: torch.Generator, number: int) -> Inputs:
    inputs = masked_spectrum(config, generator, number)
    return {"input_features": inputs["input_features"], "input_features_mask": inputs["feature_attention_mask"].bool()}


def frames(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """[1, frames, values of one]: conformers."""
    encoder = getattr(config, "encoder_config", None) or config.audio_config
    size: Any = (
        getattr(encoder, "input_dim", None)
        or getattr(encoder, "input_size", None)
        or getattr(encoder, "num_mel_bins", 80)
    )
    return {"input_features": torch.randn(1, 30, size, generator=generator)}


def merged_patches(config: Any, generator: torch.Generator, number: int) -> Inputs:
    inputs = patches(config, generator, number)
    return {**inputs, "image_merge_sizes": torch.tensor([2])}


def packed_patches(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """[1, patches, values of one], and rows and columns: SigLIP 2."""
    height, width = ((4, 6), (6, 4))[number % 2]
    patch = vision_of(config).patch_size
    pixels = torch.randn(1, height * width, 3 * patch * patch, generator=generator)
    return {
        "pixel_values": pixels, "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": torch.ones(1, height * width, dtype=torch.long),
    }  # fmt: skip


def asked(config: Any, generator: torch.Generator, number: int) -> Inputs:
    """An image, and the question that a Q-Former reads beside it."""
    ids = torch.randint(3, 200, (1, 6), generator=generator)
    return {
        **plain(config, generator, number),
        "qformer_input_ids": ids,
        "qformer_attention_mask": torch.ones_like(ids),
    }


def two_resolutions(config: Any, generator: torch.Generator, number: int) -> Inputs:
    size = config.high_res_vision_config.image_size
    return {
        **plain(config, generator, number),
        "high_res_pixel_values": torch.randn(1, 3, size, size, generator=generator),
    }


IMAGE_FORMS: tuple[Form, ...] = (
    patches, tiles, with_sizes, several, square_patches, merged_patches, packed_patches, asked, two_resolutions, plain,
)  # fmt: skip
AUDIO_FORMS: tuple[Form, ...] = (masked_spectrum, masked_spectrum_2, spectrum, frames)


def item_inputs(model: Any, config: Any, kind: str) -> Iterator[tuple[Form, list[Inputs], list[torch.Tensor]]]:
    """The forms that the model's own code takes: inputs and feature rows [F, H] of two items."""
    import inspect

    accepted = set(inspect.signature(model.forward).parameters)
    for form in IMAGE_FORMS if kind == "image" else AUDIO_FORMS:
        generator = torch.Generator().manual_seed(3)
        try:
            inputs = [form(config, generator, number) for number in range(2)]
            if not set(inputs[0]) <= accepted:
                continue
            yield form, inputs, [features_of(model, config, kind, one) for one in inputs]
        except Exception:  # not this model's form
            continue


def features_of(model: Any, config: Any, kind: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """By the model's own ``get_image_features`` or ``get_audio_features``: [F, H]."""
    import inspect

    function = getattr(model, f"get_{kind}_features", None) or getattr(model.base_model, f"get_{kind}_features", None)
    if function is None:
        return _by_trial(model, config, kind, inputs)
    names = inspect.signature(function).parameters
    given = {name: value for name, value in inputs.items() if name in names or "kwargs" in names}
    with torch.inference_mode():
        output = function(**given, **({"return_dict": True} if "kwargs" in names else {}))
    found = output if isinstance(output, (torch.Tensor, list, tuple)) else output.pooler_output
    if found is None:
        return _by_trial(model, config, kind, inputs)
    rows = list(found) if isinstance(found, (list, tuple)) else [found]
    return torch.cat([row.reshape(-1, row.shape[-1]) for row in rows])


def _by_trial(model: Any, config: Any, kind: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As many rows as placeholders with which the model's forward runs."""
    from modelbay_transformers.media import placeholder_id

    error: Exception | None = None
    token = placeholder_id(config, kind)
    assert token is not None, f"the config says no id of a placeholder for {kind}"
    for count in range(2, 80):
        ids = torch.full((1, count), token)
        try:
            with torch.inference_mode():
                model(input_ids=ids, **inputs)
        except Exception as found:
            error = found
        else:
            return torch.zeros(count, 1)
    assert error is not None
    raise error
