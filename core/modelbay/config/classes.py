"""Which class the config becomes: a plugin's, Transformers', or the repository's own behind the trust gate (C2)."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelbay.config.plain import PlainConfig
from modelbay.errors import ConfigError, ModelbayError
from modelbay.specs import load_target
from modelbay.trace import Rejected

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace


@dataclass(frozen=True, slots=True)
class ConfigObject:
    """A config object and where its class came from: "own", "transformers" or "remote"."""

    hf: Any
    origin: str
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def build_config(
    raw: Mapping[str, Any],
    patched: Mapping[str, Any],
    files: ModelFiles,
    plugins: Plugins,
    args: EngineArgs,
    trace: Trace,
) -> ConfigObject:
    """Choose the class by ``model_type`` and call it.

    Args:
        raw: the dict after overrides, which an old remote class gets as it was written for it.
        patched: the same after the historical patches, which every other class gets.

    Raises:
        ConfigError: nobody knows the type, or the class refuses the values.
        TrustError: only code in the repository knows the type, and it is not trusted.
    """
    model_type = raw.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise ConfigError(f"the config's model_type must be a name, got {model_type!r}.")
    auto_map = raw.get("auto_map") or {}
    if not isinstance(auto_map, Mapping):
        raise ConfigError(f"the config's auto_map must be an object, got {auto_map!r}.")
    own = plugins.get("config_classes", model_type) if model_type is not None else None
    remote = auto_map.get("AutoConfig")
    if own is not None:
        cls = load_target(own.value.target)
        rejected = (Rejected(f"auto_map {remote}", "a plugin's own class never gives way"),) if remote else ()
        trace.decide("config", "config class", _class_name(cls), str(own.owner), rejected=rejected)
        aliases = {**getattr(cls, "aliases", {}), **own.value.aliases}
        return ConfigObject(_call(cls, patched), "own", aliases)
    cls, version = transformers_class(model_type)
    if cls is not None:
        rejected = (Rejected(f"auto_map {remote}", "Transformers has the type itself"),) if remote else ()
        trace.decide("config", "config class", _class_name(cls), f"transformers {version}", rejected=rejected)
        return ConfigObject(_call(cls, without_refused_nulls(cls, patched)), "transformers")
    if remote is None:
        raise _unknown_type(model_type, version, plugins)
    cls = _remote_class(remote, files, args, trace)
    trace.decide("config", "config class", _class_name(cls), f"auto_map of {files.reference}")
    return ConfigObject(_call(cls, raw), "remote")


def build_nested(raw: Mapping[str, Any], plugins: Plugins) -> ConfigObject:
    """The object for a text config that the outer class keeps as a plain dict."""
    model_type = raw.get("model_type")
    own = plugins.get("config_classes", model_type) if isinstance(model_type, str) else None
    if own is not None:
        cls = load_target(own.value.target)
        return ConfigObject(_call(cls, raw), "own", {**getattr(cls, "aliases", {}), **own.value.aliases})
    cls, _ = transformers_class(model_type)
    if cls is not None:
        return ConfigObject(_call(cls, without_refused_nulls(cls, raw)), "transformers")
    return ConfigObject(PlainConfig(**raw), "own")


def transformers_class(model_type: Any) -> tuple[Any, str | None]:
    """Transformers' config class for a type and Transformers' version; None for what there is not."""
    version = transformers_version()
    if version is None or not isinstance(model_type, str):
        return None, version
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Not .get(): the mapping is lazy and only its [] loads classes.
    if model_type not in CONFIG_MAPPING:
        return None, version
    return CONFIG_MAPPING[model_type], version


def transformers_version() -> str | None:
    """The installed version of Transformers, without importing it."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _remote_class(reference: str, files: ModelFiles, args: EngineArgs, trace: Trace) -> Any:
    from modelbay.trust import load_remote_class

    return load_remote_class(
        reference,
        files,
        trusted=args.trust_remote_code,
        code_revision=args.code_revision,
        what="the config class",
        trace=trace,
    )


def without_refused_nulls(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Null is the same as absent, also for Transformers' typed fields, which refuse a null that they do not list.

    KV heads are the exception here as everywhere: their null means as many as attention heads.
    """
    fields = getattr(cls, "__dataclass_fields__", {})
    refused = {key for key, value in values.items() if value is None and key in fields and _refuses_null(fields[key])}
    kept = {key: value for key, value in values.items() if key not in refused}
    if "num_key_value_heads" in refused and "num_attention_heads" in kept:
        kept["num_key_value_heads"] = kept["num_attention_heads"]
    return kept


def _refuses_null(entry: dataclasses.Field[Any]) -> bool:
    if entry.default is None:
        return False
    return (
        type(None) not in typing.get_args(entry.type) if not isinstance(entry.type, str) else "None" not in entry.type
    )


def _call(cls: Any, values: Mapping[str, Any]) -> Any:
    """``cls(**values)``; whatever a class raises about its values is the config's fault, said in one line."""
    from modelbay.trust import contained

    try:
        with contained(f"the config class {cls.__name__}"):
            return cls(**copy.deepcopy(dict(values)))
    except ModelbayError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        detail = " ".join(lines) or type(error).__name__
        raise ConfigError(f"{cls.__name__} refuses the config: {detail}") from error


def _class_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _unknown_type(model_type: Any, version: str | None, plugins: Plugins) -> ConfigError:
    if not model_type:
        return ConfigError(
            "the config has no model_type, and no auto_map that names a config class.",
            hint='Say it with hf_overrides, e.g. {"model_type": "llama"}.',
        )
    searched = (
        ", ".join(sorted({str(owned.owner) for owned in plugins.all("config_classes")})) or "none with config classes"
    )
    transformers = f"transformers {version}" if version else "transformers (not installed)"
    return ConfigError(
        f"unknown model_type {model_type!r}: neither {transformers} nor the plugins searched have it ({searched}).",
        hint="The repository has no auto_map for its config, so trust_remote_code would not help: install a plugin "
        f"for it, or a newer transformers. {plugins.absent_hint('config_classes', model_type)}".rstrip(),
    )
