"""What a user set outside the call: the config file and the environment, each value with its source.

The file is TOML: ``[prefer]`` (name = distribution), ``[args]`` (default engine arguments), and ``[model_impl]``
(architecture = backend). It is ``$MODELBAY_CONFIG`` (empty: none), else ``modelbay/config.toml`` in the user's
configuration directory.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelbay.errors import UsageError
from modelbay.registry import Preference
from modelbay.small_files import read_text

SECTIONS = ("prefer", "args", "model_impl")

#: Engine arguments that cannot stand in the file: the model is asked for each time, preferences have a section.
_NOT_IN_FILE = {"model", "prefer", "plugins"}


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective settings. ``path`` is the config file that was read, None if there is none."""

    path: Path | None = None
    prefer: Mapping[str, Preference] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    model_impl: Mapping[str, str] = field(default_factory=dict)

    def with_defaults(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Engine arguments: those given, over those of the file. None is not given."""
        return {**self.args, **{name: value for name, value in kwargs.items() if value is not None}}


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the config file and the environment.

    Raises:
        UsageError: naming the file (or the variable) and what is wrong in it.
    """
    environ = os.environ if environ is None else environ
    path = config_path(environ)
    data = _read(path) if path else {}
    prefer = {name: Preference(dist, str(path)) for name, dist in data.get("prefer", {}).items()}
    for name, dist in parse_prefer(environ.get("MODELBAY_PREFER", "").split(","), "MODELBAY_PREFER").items():
        prefer[name] = Preference(dist, "MODELBAY_PREFER")
    return Settings(path, prefer, _engine_args(data.get("args", {}), path), data.get("model_impl", {}))


def config_path(environ: Mapping[str, str]) -> Path | None:
    """The config file to read, None if there is none."""
    if "MODELBAY_CONFIG" in environ:
        named = environ["MODELBAY_CONFIG"].strip()
        if named and not Path(named).is_file():
            raise UsageError(f"MODELBAY_CONFIG names {named!r}, which is not a file.", hint="Correct it or unset it.")
        return Path(named) if named else None
    path = default_path(environ)
    return path if path.exists() else None


def default_path(environ: Mapping[str, str]) -> Path:
    """Where the config file is looked for when MODELBAY_CONFIG does not name one."""
    if os.name == "nt":
        return Path(environ.get("APPDATA") or Path.home() / "AppData/Roaming", "modelbay", "config.toml")
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "modelbay", "config.toml")


def parse_prefer(entries: Any, source: str) -> dict[str, str]:
    """``["NAME=DIST", …]`` to a dict; empty entries are skipped."""
    prefer: dict[str, str] = {}
    for entry in filter(None, (entry.strip() for entry in entries)):
        name, separator, distribution = (part.strip() for part in entry.partition("="))
        if not separator or not name or not distribution:
            raise UsageError(f"{source} has {entry!r}; it takes NAME=DIST.")
        if prefer.setdefault(name, distribution) != distribution:
            raise UsageError(f"{source} prefers both {prefer[name]!r} and {distribution!r} for {name!r}.")
    return prefer


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        data = tomllib.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"cannot read the config file {path}: {error.strerror}.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the config file {path}: {error}.") from error
    for section, content in data.items():
        if section not in SECTIONS:
            raise UsageError(f"unknown section [{section}] in {path}.", hint=f"Known: {', '.join(SECTIONS)}.")
        if not isinstance(content, dict):
            raise UsageError(f"[{section}] in {path} must be a table, got {content!r}.")
    for section in ("prefer", "model_impl"):
        for name, value in data.get(section, {}).items():
            if not isinstance(value, str):
                raise UsageError(f"[{section}] {name} in {path} must be a string, got {value!r}.")
    return data


def _engine_args(data: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Checked by building the arguments once, so that a fault names the file and not the call that met it."""
    if not data:
        return {}
    from modelbay.args import EngineArgs

    args = {name.replace("-", "_"): value for name, value in data.items()}
    refused = sorted(_NOT_IN_FILE & args.keys())
    if refused:
        raise UsageError(f"[args] in {path} cannot hold {', '.join(refused)}.")
    for entry in dataclasses.fields(EngineArgs):
        if entry.name in args and not _fits(args[entry.name], str(entry.type)):
            raise UsageError(f"[args] {entry.name} in {path} must be {entry.type}, got {args[entry.name]!r}.")
    try:
        EngineArgs.create("", **args)
    except (UsageError, TypeError) as error:
        raise UsageError(f"[args] in {path}: {error}") from error
    return args


def _fits(value: Any, annotation: str) -> bool:
    kind = annotation.removesuffix(" | None")
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float)
    expected: dict[str, type] = {"str": str, "int": int, "Mapping[str, Any]": dict, "Sequence[str]": list}
    return isinstance(value, expected.get(kind, object))
