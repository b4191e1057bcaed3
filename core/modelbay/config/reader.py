"""The checkpoint's own config: config.json, or what a load format reads out of the checkpoint (C1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelbay.config.origins import CONFIG_FILE, Origins
from modelbay.errors import ConfigError, NotAModelError
from modelbay.specs import LoadFormatSpec, StoredConfig, load_target

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

MAX_DEPTH = 64
_FIRST_OF_SPLIT = re.compile(r"-0*1-of-\d+\.[^.]+$")
_SPLIT = re.compile(r"-\d+-of-\d+\.[^.]+$")


def read_raw(files: ModelFiles, plugins: Plugins, args: EngineArgs, trace: Trace) -> tuple[dict[str, Any], Origins]:
    """The config as a dict, and where its values stand.

    A reference that is one file is self-contained: its own config is taken even beside a config.json.
    """
    formats = _formats_with_config(plugins, args)
    if files.entry is not None:
        for spec in formats:
            if files.entry.endswith(spec.suffixes):
                return _from_format(files, files.entry, spec, trace)
    said = files.read_json(CONFIG_FILE)
    check_depth(said, CONFIG_FILE)
    raw = _decode_floats(said)
    if raw is not None:
        trace.decide("config", "config file", CONFIG_FILE, str(files.root))
        return raw, Origins()
    for spec in formats:
        names = files.match(*(f"*{suffix}" for suffix in spec.suffixes))
        if names:
            return _from_format(files, _only(names, files.reference), spec, trace)
    raise NotAModelError(
        f"{files.reference!r} has no config.json, and no load format that carries a config fits its files.",
        hint=f"Load formats that carry one: {', '.join(spec.name for spec in formats) or 'none installed'}.",
    )


def _formats_with_config(plugins: Plugins, args: EngineArgs) -> list[LoadFormatSpec]:
    specs: list[LoadFormatSpec] = [owned.value for owned in plugins.all("load_formats") if owned.value.config]
    return [spec for spec in specs if args.load_format in ("auto", spec.name, "dummy")]


def _from_format(files: ModelFiles, name: str, spec: LoadFormatSpec, trace: Trace) -> tuple[dict[str, Any], Origins]:
    path = files.path(name)
    assert path is not None, name
    assert spec.config is not None, spec
    read = load_target(spec.config)(path)
    trace.decide("config", "config file", name, f"read out of the checkpoint by load format {spec.name!r}")
    origins = Origins(name, reader=f"load format {spec.name!r}")
    if not isinstance(read, StoredConfig):
        return read, origins
    return read.values, origins.reading(read.values, read.sources)


def _only(names: tuple[str, ...], reference: str) -> str:
    """The one checkpoint file of a directory; of a split checkpoint, its first part."""
    if len(names) == 1:
        return names[0]
    first = [name for name in names if _FIRST_OF_SPLIT.search(name)]
    if len(first) == 1 and all(_SPLIT.search(name) for name in names):
        return first[0]
    raise ConfigError(
        f"{reference!r} has no config.json and {len(names)} checkpoint files that carry one: {', '.join(names[:5])}.",
        hint="Name one of the files instead of the directory.",
    )


def check_depth(value: Any, what: str, depth: int = 0) -> None:
    """Refuse what no config nests, before something that walks it runs out of stack."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{what} is nested too deeply to be a config (more than {MAX_DEPTH} levels).")
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        check_depth(item, what, depth + 1)


def _decode_floats(value: Any) -> Any:
    """Transformers writes the floats that JSON cannot hold as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decode_floats(item) for key, item in value.items()}
    return [_decode_floats(item) for item in value] if isinstance(value, list) else value
