"""One plugin's registrations, read and validated: all of them or an error. Pluggy does the checking of hooks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pluggy

from modelbay import hookspecs
from modelbay.errors import PluginError
from modelbay.registry import TABLES
from modelbay.specs import (
    TASKS,
    ArchSpec,
    AttentionKindSpec,
    BackendSpec,
    CommandSpec,
    ConfigClassSpec,
    ConfigPatch,
    KernelSpec,
    LoadFormatSpec,
    QuantizationSpec,
    TokenizerModeSpec,
)

#: Table -> the type of its records.
RECORD_TYPES: Mapping[str, type[Any]] = {
    "architectures": ArchSpec,
    "config_classes": ConfigClassSpec,
    "config_patches": ConfigPatch,
    "tokenizer_modes": TokenizerModeSpec,
    "load_formats": LoadFormatSpec,
    "modeling_backends": BackendSpec,
    "attention_kinds": AttentionKindSpec,
    "kernels": KernelSpec,
    "quantizations": QuantizationSpec,
    "commands": CommandSpec,
}

#: Names that mean "choose for me" where these tables' names are values of an argument.
RESERVED = {"tokenizer_modes": {"auto"}, "load_formats": {"auto"}, "modeling_backends": {"auto"}}

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TARGET_FIELDS = {"target", "constraint", "available"}


@dataclass(slots=True)
class Registration:
    """What one plugin registers. ``error`` is set when any of it is wrong; then none of it counts."""

    hooks: tuple[str, ...] = ()
    records: dict[str, list[Any]] = field(default_factory=dict)
    error: Exception | None = None

    def offers(self) -> dict[str, tuple[str, ...]]:
        """Per table, the names that could be read, also from a plugin that failed elsewhere."""
        return {table: tuple(getattr(r, TABLES[table]) for r in records) for table, records in self.records.items()}


def read_plugin(plugin: Any, name: str) -> Registration:
    """Validate a plugin's hooks, call them, and validate what they return. Never raises for a faulty plugin.

    Every plugin gets a manager of its own, so that none can see, wrap or reorder another's registrations, and a
    failure half-way leaves nothing behind.
    """
    registration = Registration()
    try:
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        _check_marked(plugin, name)
        manager.register(plugin, name)
        manager.check_pending()
    except Exception as error:
        registration.error = error
        return registration
    implemented = [caller.name for caller in manager.get_hookcallers(plugin) or () if caller.spec]
    registration.hooks = tuple(sorted(implemented))
    for table in TABLES:
        if f"register_{table}" in implemented:
            _read_table(manager, table, name, registration)
    return registration


def _read_table(manager: pluggy.PluginManager, table: str, name: str, registration: Registration) -> None:
    """Add the records of one table; on a fault keep the first error and the names read so far."""
    records = registration.records.setdefault(table, [])
    try:
        for record in _returned(manager, table, name):
            _check_record(record, table, name)
            _check_unique(record, records, table, name)
            records.append(record)
    except (Exception, SystemExit) as error:
        if registration.error is None:
            registration.error = error if isinstance(error, Exception) else PluginError(f"SystemExit: {error}")


def _returned(manager: pluggy.PluginManager, table: str, name: str) -> Iterable[Any]:
    results = getattr(manager.hook, f"register_{table}")()  # pluggy leaves out None
    if not results:
        raise _fault(name, table, "it returned None; return an empty list to register nothing.")
    if len(results) > 1:
        raise _fault(name, table, "it is implemented twice in this plugin.")
    if isinstance(results[0], str | Mapping) or not isinstance(results[0], Iterable):
        raise _fault(name, table, f"it returned {_shown(results[0])}, not an iterable of records.")
    return results[0]


def _check_marked(plugin: Any, name: str) -> None:
    """A `register_…` function without the marker would be ignored by pluggy: say so instead."""
    module_name = plugin.__name__ if isinstance(plugin, ModuleType) else None
    for attribute in sorted(vars(plugin) if module_name else ()):
        function = getattr(plugin, attribute)
        own = callable(function) and getattr(function, "__module__", None) == module_name
        if not attribute.startswith("register_") or not own:
            continue
        if not hasattr(function, f"{hookspecs.PROJECT}_impl"):
            known = attribute.removeprefix("register_") in TABLES
            what = "is not marked" if known else "is no hook of Modelbay, and is not marked"
            raise PluginError(
                f"Plugin {name!r}, function {attribute}(): it {what} with @modelbay.hookimpl, so it would be ignored.",
                hint="Mark it." if known else f"Hooks: {', '.join(f'register_{table}' for table in TABLES)}.",
            )


def _check_record(record: Any, table: str, name: str) -> None:
    expected = RECORD_TYPES[table]
    if not isinstance(record, expected):
        raise _fault(name, table, f"it returned {_shown(record)} where a {expected.__name__} belongs.")
    key = getattr(record, TABLES[table])
    if not isinstance(key, str) or not key.strip():
        raise _fault(name, table, f"{expected.__name__}: {TABLES[table]} must be a non-empty string, got {key!r}.")
    for entry in dataclasses.fields(record):
        problem = _field_problem(entry, getattr(record, entry.name), table)
        if problem:
            raise _fault(name, table, f"{expected.__name__} {key!r}: {entry.name} {problem}.")
    problem = _arch_problem(record) if isinstance(record, ArchSpec) else None
    if key in RESERVED.get(table, ()):
        problem = "this name is reserved"
    if problem:
        raise _fault(name, table, f"{expected.__name__} {key!r}: {problem}.")


def _check_unique(record: Any, records: list[Any], table: str, name: str) -> None:
    key = TABLES[table]
    if table != "kernels" and any(getattr(other, key) == getattr(record, key) for other in records):
        raise _fault(name, table, f"it returned {getattr(record, key)!r} twice.")


def _field_problem(entry: dataclasses.Field[Any], value: Any, table: str) -> str | None:
    check = _CHECKS.get(str(entry.type))
    if check is not None and not check(value):
        return f"must be {entry.type}, got {_shown(value)}"
    if str(entry.type).startswith("tuple[") and not isinstance(value, tuple):
        return f"must be a tuple, got {_shown(value)}"
    is_target = entry.name in _TARGET_FIELDS or (table == "load_formats" and entry.name in ("config", "transforms"))
    if is_target and value is not None and not _TARGET.fullmatch(value):
        return f'must be of the form "package.module:object", got {value!r}'
    return None


def _arch_problem(arch: ArchSpec) -> str | None:
    unknown = [task for task in arch.tasks if task not in TASKS]
    if unknown or not arch.tasks:
        return f"tasks must be some of {', '.join(TASKS)}, got {arch.tasks!r}"
    low, high = arch.contract
    return None if low <= high else f"contract must be (lowest, highest), got {arch.contract!r}"


def _strings(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: What the annotations of `modelbay.specs` mean at run time; those not listed are not checked here.
_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": _integer,
    "int | None": lambda value: value is None or _integer(value),
    "tuple[str, ...]": _strings,
    "tuple[int, int]": lambda value: isinstance(value, tuple) and len(value) == 2 and all(map(_integer, value)),
    "Mapping[str, str]": lambda value: isinstance(value, Mapping),
    "Mapping[str, tuple[str, ...]]": lambda value: isinstance(value, Mapping) and all(map(_strings, value.values())),
    "Mapping[str, tuple[list[str], list[str]]]": lambda value: isinstance(value, Mapping),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _fault(name: str, table: str, problem: str) -> PluginError:
    """The four facts: the plugin, the hook, its signature, what is wrong."""
    signature = f"register_{table}() -> Iterable[{RECORD_TYPES[table].__name__}]"
    return PluginError(f"Plugin {name!r}, hook 'register_{table}', signature {signature}: {problem}")
