"""The language model inside a model with towers for images and audio, and how each of its parts attends."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from modelbay.errors import BackendError
from modelbay_transformers import dispatch
from modelbay_transformers.probe_run import configs_of
from modelbay_transformers.surgery import module_name

_IMAGE = ("pixel_values", "images", "image_patches")
_AUDIO = (
    "input_features",
    "input_values",
    "audio_input_values",
    "audio_values",
    "audio_input_features",
    "audio_features",
)


def media_classes() -> dict[str, str]:
    """Model type -> the class that Transformers lists among those that read text together with images or audio."""
    from transformers.models.auto import modeling_auto as auto

    return {**auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


def takes_media(model_class: Any) -> bool:
    """Whether it is such a class, and its forward takes more than text."""
    return model_class.__name__ in media_classes().values() and bool(media_kinds(model_class))


def media_kinds(model: Any) -> tuple[str, ...]:
    """ "image" and "audio", as far as the forward of Transformers' class takes them."""
    names = set(inspect.signature(model.forward).parameters)
    kinds = {"image": _IMAGE, "audio": _AUDIO}
    return tuple(kind for kind, arguments in kinds.items() if names & set(arguments))


def language_model_path(outer: nn.Module) -> str:
    """The name of the module that turns embeddings into the hidden states that the head of ``outer`` takes.

    Raises:
        BackendError: it is not to be found, or is the model itself.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        found: Any = outer.get_decoder()  # type: ignore[operator]
    except Exception as error:
        raise BackendError(f"{type(outer).__name__} does not say which of its parts is its language model.") from error
    with_heads = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    while type(found).__name__ in with_heads and found is not outer:
        inner = found.get_decoder()  # what its forward calls, which may be within its base model
        if inner is found:
            break
        found = inner
    path = module_name(outer, found)
    if not path:
        raise BackendError(f"{type(outer).__name__} has no part that is its language model alone.")
    return path


def serve_attention(outer: nn.Module, path: str) -> None:
    """The language model attends by the runtime's kernels. Towers and projectors were built to attend as Transformers
    lets them."""
    for config in language_configs(outer, path):
        config._attn_implementation_internal = dispatch.ATTENTION


def language_configs(outer: nn.Module, path: str) -> list[Any]:
    """The configs by which masks and attention of the language model are chosen: its own, and those of the modules that
    hold it, as far as no tower has the same."""
    language_model = outer.get_submodule(path)
    found = configs_of(language_model)
    above = [outer.get_submodule(name) for name in _above(path)]
    inside = {*language_model.modules(), *above}
    of_towers = {id(getattr(module, "config", None)) for module in outer.modules() if module not in inside}
    for module in above:
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal") and id(config) not in of_towers:
            found.append(config)
    return list({id(config): config for config in found}.values())


def head_of(outer: nn.Module, path: str) -> nn.Module:
    """The nearest module around the language model that has a head over the vocabulary."""
    for name in reversed(_above(path)):
        module: Any = outer.get_submodule(name)
        if hasattr(module, "get_output_embeddings") and module.get_output_embeddings() is not None:
            return module
    return outer


def _above(path: str) -> list[str]:
    """ "model.language_model" -> "", "model"."""
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]
