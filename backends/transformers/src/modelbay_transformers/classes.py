"""Which classes of Transformers make up a model, and the config they are built from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from modelbay.config import ModelConfig
from modelbay.errors import BackendError
from modelbay.resolve import Resolution
from modelbay_transformers.language import media_classes, takes_media


@dataclass(frozen=True, slots=True)
class ModelClasses:
    """``base`` computes hidden states. ``head``, if there is one, is the class around it that computes logits (over the
    vocabulary, or of a classifier).

    A model that was made to generate has its head also when it is asked for hidden states: its checkpoint has it.
    ``media``: ``head`` holds towers for images or audio beside its language model.
    """

    config: Any
    base: type
    head: type | None
    source: str
    media: bool = False


def find_classes(resolution: Resolution) -> ModelClasses:
    """The classes for a resolved model.

    Raises:
        BackendError: Transformers has no base model for it.
    """
    config = own_config(resolution.config)
    around = _transformers_media_class(resolution)
    if around is not None and _is_for(around, config):
        return ModelClasses(config, around, around, "Transformers", media=True)
    if resolution.task == "classify":
        from modelbay_transformers.heads import classification_head

        head: Any = classification_head(resolution, config)
    else:
        head = _transformers_head(resolution)
    if head is not None and not isinstance(config, head.config_class):
        inner = config.get_text_config()  # a composite config whose language model is a class of its own
        config = inner if isinstance(inner, head.config_class) else config
    base = _transformers_base(config) or head
    if base is None:
        raise BackendError(f"Transformers has no base model for model_type {resolution.config.model_type!r}.")
    return ModelClasses(config, base, head, "Transformers")


def own_config(config: ModelConfig) -> Any:
    """A Transformers config object that belongs to one instance: the attention implementation is set on it."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(config.hf, PretrainedConfig):
        found = copy.deepcopy(config.hf)
    elif config.model_type in CONFIG_MAPPING:
        raw = {key: value for key, value in config.raw.items() if key != "quantization_config"}
        found = CONFIG_MAPPING[config.model_type].from_dict(copy.deepcopy(raw))
    else:
        raise BackendError(f"Transformers has no config class for model_type {config.model_type!r}.")
    if hasattr(found, "quantization_config"):
        del found.quantization_config  # weights are dequantised while they are loaded
    return found


def _transformers_base(config: Any) -> type | None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return None
    found = MODEL_MAPPING[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _transformers_media_class(resolution: Resolution) -> Any:
    """The class that the config names, if it generates and reads images or audio beside text."""
    import transformers

    found = getattr(transformers, resolution.architecture, None)
    return found if resolution.task == "generate" and found is not None and takes_media(found) else None


def _is_for(model_class: Any, config: Any) -> bool:
    """Whether Transformers builds the class from such a config: from its own, or one that it lists the class for."""
    listed = media_classes().get(config.model_type)
    return isinstance(config, model_class.config_class) or listed == model_class.__name__


def _transformers_head(resolution: Resolution) -> Any:
    """The class that the config names, if Transformers has it and it is a language model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return getattr(transformers, resolution.architecture, None) if resolution.architecture in known else None
