"""Which classes of Transformers make up a model, and the config they are built from."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelbay.config import ModelConfig
from modelbay.config.classes import without_refused_nulls
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
        if isinstance(inner, head.config_class):
            config = inner
        else:
            head = _listed_head(resolution.task, config) or head
    base = _transformers_base(config, resolution.architecture) or head
    if base is None:
        raise BackendError(f"Transformers has no base model for model_type {resolution.config.model_type!r}.")
    return ModelClasses(config, base, head, "Transformers")


def own_config(config: ModelConfig) -> Any:
    """A Transformers config object that belongs to one instance: the attention implementation is set on it.

    Its class is the one that Transformers' AutoConfig chooses, which is not always the one listed for the model type.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = {key: value for key, value in config.raw.items() if key not in ("quantization_config", "auto_map")}
    listed = chosen = None
    if config.model_type in CONFIG_MAPPING:
        listed = CONFIG_MAPPING[config.model_type]
        chosen = _chosen_by_auto_config(raw, listed)
    if isinstance(config.hf, PretrainedConfig) and (type(config.hf) is not listed or chosen is listed):
        found = copy.deepcopy(config.hf)
    elif chosen is not None:
        values = without_refused_nulls(chosen, copy.deepcopy(raw))
        found = chosen.from_dict({**values, "model_type": chosen.model_type})
    else:
        raise BackendError(f"Transformers has no config class for model_type {config.model_type!r}.")
    if hasattr(found, "quantization_config"):
        del found.quantization_config  # weights are dequantised while they are loaded
    return found


def _chosen_by_auto_config(raw: Mapping[str, Any], listed: Any) -> Any:
    """The class that AutoConfig makes of a config, by rules of its own (a Mistral with layer types is a Ministral).

    AutoConfig reads files and nothing else, so it is given one.
    """
    from transformers import AutoConfig

    values = {**without_refused_nulls(listed, raw), "model_type": listed.model_type}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values, default=str), encoding="utf-8")
        return type(AutoConfig.from_pretrained(folder, local_files_only=True))


def _transformers_base(config: Any, architecture: str) -> type | None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return None
    found = MODEL_MAPPING[type(config)]
    listed = found if isinstance(found, (tuple, list)) else (found,)
    return next((model for model in listed if model.__name__ == architecture), listed[0])


def _listed_head(task: str, config: Any) -> Any:
    """The class with a head that Transformers lists for this config, whatever the checkpoint calls its own."""
    from transformers.models.auto import modeling_auto as auto

    mapping = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if task == "classify" else auto.MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping.get(type(config), None)


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
