"""The names in ``architectures``, wherever the config has them, or what they must be (C3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelbay.config.classes import transformers_class
from modelbay.config.limits import check_names
from modelbay.config.origins import Origins
from modelbay.errors import ConfigError

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.plugins import Plugins


def architecture_names(
    raw: Mapping[str, Any], text_path: tuple[str, ...], plugins: Plugins, args: EngineArgs, origins: Origins
) -> tuple[tuple[str, ...], str]:
    """The names and their source: the config, its text config, or inferred from model type and task.

    Raises:
        ConfigError: none is said and none can be inferred.
    """
    level: Mapping[str, Any] = raw
    for depth in range(len(text_path) + 1):
        names = _names(level.get("architectures"))
        if names:
            return names, origins.of((*text_path[:depth], "architectures"))
        if depth < len(text_path):
            level = level[text_path[depth]]
    model_type = raw.get("model_type")
    pooling = args.runner == "pooling" or args.convert in ("embed", "classify")
    task = "pooling" if pooling else "generate"
    remote = _of_auto_map(raw.get("auto_map"), pooling)
    for names in (_registered(model_type, pooling, plugins), _of_transformers(model_type, pooling), remote):
        if len(names) == 1 and names is remote:
            return names, f"derived: auto_map and task {task}"
        if len(names) == 1:
            return names, f"derived: model_type {model_type!r} and task {task}"
        if names:
            raise _missing(f"model_type {model_type!r} has several for {task}: {', '.join(names)}.", names[0])
    raise _missing(f"nobody has one for model_type {model_type!r} and task {task}.", "LlamaForCausalLM")


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if value is None or value == []:
        return ()
    check_names("architectures", value)
    return tuple(value)


def _registered(model_type: Any, pooling: bool, plugins: Plugins) -> tuple[str, ...]:
    wanted = ("embed", "classify", "score") if pooling else ("generate",)
    specs = [owned.value for owned in plugins.all("architectures")]
    return tuple(
        sorted({spec.name for spec in specs if model_type in spec.model_types and set(spec.tasks) & set(wanted)})
    )


def _of_transformers(model_type: Any, pooling: bool) -> tuple[str, ...]:
    if transformers_class(model_type)[0] is None:
        return ()
    from transformers.models.auto import modeling_auto as auto

    tables = (
        (auto.MODEL_MAPPING_NAMES,)
        if pooling
        else (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    )
    for table in tables:
        name = table.get(model_type)
        if name is not None:
            return (name,) if isinstance(name, str) else tuple(name)
    return ()


def _of_auto_map(auto_map: Any, pooling: bool) -> tuple[str, ...]:
    """The class that a repository of its own code names for the task: its base model if it has no other."""
    if not isinstance(auto_map, Mapping):
        return ()
    order = ("AutoModel",) if pooling else ("AutoModelForCausalLM", "AutoModel")
    reference = next((auto_map[key] for key in order if isinstance(auto_map.get(key), str)), None)
    return () if reference is None else (reference.rpartition(".")[2],)


def _missing(reason: str, example: str) -> ConfigError:
    return ConfigError(
        f"the config has no architectures, and it cannot be inferred: {reason}",
        hint=f'Say it with hf_overrides, e.g. {{"architectures": ["{example}"]}}.',
    )
