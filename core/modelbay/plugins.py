"""Discovery, selection and isolation of plugins. No process-wide state: every caller holds its `Plugins`.

A plugin is an entry point in the group ``modelbay``, or a module given in-process. Its registrations are data, taken
all or none. One that fails is skipped with a warning; what it would have offered is then missed by name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from modelbay.errors import PluginError, UsageError, one_line, one_line_with_type
from modelbay.registration import Registration, read_plugin
from modelbay.registry import IN_PROCESS, TABLES, Owned, PluginRecord, Plugins, Preference, canonical
from modelbay.settings import Settings, load_settings
from modelbay.specs import Owner
from modelbay.trace import Rejected, Trace

__all__ = ["TABLES", "Owned", "PluginRecord", "Plugins", "load_plugins"]

GROUP = "modelbay"
_CORE = "modelbay.builtin"


@dataclass(frozen=True, slots=True)
class _Found:
    """A plugin before it is loaded: who brings it, and its module (or why there is none)."""

    owner: Owner
    target: str
    module: ModuleType | None = None
    fault: Exception | None = None

    @property
    def sort_key(self) -> tuple[str, str, str]:
        return canonical(self.owner.distribution), self.owner.plugin, self.target

    def load(self) -> Any:
        if self.fault:
            raise self.fault
        if self.module is not None:
            return self.module
        module, _, attribute = self.target.partition(":")
        value: Any = importlib.import_module(module.strip())
        for part in filter(None, attribute.strip().split(".")):
            value = getattr(value, part)
        return value

    def record(self, status: Any, registration: Registration | None = None, error: str | None = None) -> PluginRecord:
        hooks, offers = (registration.hooks, registration.offers()) if registration else ((), {})
        owner = self.owner
        return PluginRecord(owner.plugin, owner.distribution, owner.version, self.target, status, hooks, error, offers)


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which entry points to load. ``names`` None: all of them."""

    names: tuple[str, ...] | None
    modules: tuple[ModuleType, ...]
    source: str

    def takes(self, owner: Owner) -> bool:
        if self.names is None:
            return True
        return owner.plugin in self.names or canonical(owner.distribution) in map(canonical, self.names)


def load_plugins(
    names: Sequence[str | ModuleType] | None = None,
    *,
    prefer: Mapping[str, str] | None = None,
    strict: bool = False,
    trace: Trace | None = None,
    settings: Settings | None = None,
) -> Plugins:
    """Load installed plugins (and modules given in-process) into a fresh registry.

    Args:
        names: None reads MODELBAY_PLUGINS (unset: all; empty: none). Strings select by entry point or distribution
            name, an empty list selects none, modules add plugins. Core's own registrations are always there.
        prefer: ``{name: distribution}``, over MODELBAY_PREFER, over the config file.
        strict: raise on the first plugin that fails, instead of skipping it.
        trace: gets what was loaded, skipped and chosen.
        settings: as read by `modelbay.settings.load_settings`; read here if not given.

    Raises:
        PluginError: a plugin failed and ``strict`` was asked for, or a module given in-process is faulty.
        UsageError: the environment or the config file is malformed.
    """
    trace = Trace() if trace is None else trace
    settings = load_settings() if settings is None else settings
    selection = _select(names)
    installed = _installed()
    candidates = [found for found in installed if selection.takes(found.owner)]
    candidates += _given(selection.modules, installed, candidates)

    records = [found.record("disabled") for found in installed if not selection.takes(found.owner)]
    registered: dict[str, list[Owned[Any]]] = {table: [] for table in TABLES}
    for found in [_core(), *sorted(candidates, key=lambda found: found.sort_key)]:
        registration = _load_one(found)
        error = registration.error
        if error is None:
            records.append(found.record("loaded", registration))
            for table, values in registration.records.items():
                registered[table] += [Owned(value, found.owner) for value in values]
            continue
        if strict or found.module is not None or found.target == _CORE:
            raise PluginError(f"{_subject(found)} failed: {_described(error)}.") from error
        records.append(found.record("failed", registration, _described(error)))

    plugins = Plugins(records, registered, _preferences(settings, prefer), selection.source)
    _report(plugins, selection, trace)
    return plugins


def _core() -> _Found:
    """Core's own registrations: always loaded, also where Modelbay runs without being installed."""
    from modelbay import __version__

    return _Found(Owner("modelbay", __version__, "core"), _CORE)


def _select(names: Sequence[str | ModuleType] | None) -> _Selection:
    if names is not None and not isinstance(names, Sequence):
        raise UsageError(f"plugins must be a list of names and modules, got {names!r}.")
    modules = tuple(name for name in names or () if isinstance(name, ModuleType))
    strings = tuple(name for name in names or () if isinstance(name, str))
    if isinstance(names, str) or len(modules) + len(strings) != len(names or ()):
        raise UsageError(f"plugins must be a list of names and modules, got {names!r}.")
    if strings or (names is not None and not modules):
        return _Selection(tuple(filter(None, map(str.strip, strings))), modules, "argument")
    from_env = os.environ.get("MODELBAY_PLUGINS")
    if from_env is None:
        return _Selection(None, modules, "all installed")
    return _Selection(tuple(filter(None, map(str.strip, from_env.split(",")))), modules, "MODELBAY_PLUGINS")


def _installed() -> list[_Found]:
    """Every entry point of the group, core's own left out; a distribution found twice on the path counts once.

    Distributions are read one by one, and parsed only if they name the group: faster than asking for all entry
    points, and one with broken metadata cannot take the others down.
    """
    found: list[_Found] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except (OSError, UnicodeDecodeError):
            continue
        if not text or f"[{GROUP}]" not in text:
            continue
        name, version = _identity(distribution)
        if canonical(name) in seen:
            continue
        seen.add(canonical(name))
        found += _entry_points(distribution, name, version)
    return found


def _entry_points(distribution: importlib.metadata.Distribution, name: str, version: str) -> Iterable[_Found]:
    try:
        points = sorted({(point.name, point.value) for point in distribution.entry_points if point.group == GROUP})
    except Exception as error:
        fault = PluginError(f"its entry_points.txt cannot be read: {type(error).__name__}: {error}")
        return [_Found(Owner(name, version, "?"), "?", fault=fault)]
    targets = [(point, value.partition("[")[0].strip()) for point, value in points]  # without "[extras]"
    return [_Found(Owner(name, version, point), target) for point, target in targets if target != _CORE]


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        metadata = distribution.metadata
        return metadata["Name"] or "(unnamed)", metadata["Version"] or "(unknown version)"
    except Exception:  # metadata that cannot be read must not keep the others from loading
        return "(unnamed)", "(unknown version)"


def _given(modules: Iterable[ModuleType], installed: list[_Found], selected: list[_Found]) -> list[_Found]:
    """The modules given in-process that the entry points do not bring already."""
    targets = {found.target for found in selected}
    given: dict[str, _Found] = {}
    for module in modules:
        if module.__name__ not in targets:
            given[module.__name__] = _Found(_module_owner(module, installed), module.__name__, module)
    return list(given.values())


def _module_owner(module: ModuleType, installed: list[_Found]) -> Owner:
    for found in installed:
        if found.target == module.__name__:
            return Owner(found.owner.distribution, found.owner.version, module.__name__)
    top = module.__name__.partition(".")[0]
    for name in importlib.metadata.packages_distributions().get(top, ()):
        return Owner(name, importlib.metadata.version(name), module.__name__)
    return Owner(IN_PROCESS, "", module.__name__)


def _load_one(found: _Found) -> Registration:
    """Import and read one plugin; whatever it raises, even SystemExit, ends up in the registration."""
    try:
        return read_plugin(found.load(), found.owner.plugin)
    except Exception as error:
        return Registration(error=error)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit, or the panic of an extension module
        return Registration(error=PluginError(f"{type(error).__name__}: {error}"))


def _preferences(settings: Settings, prefer: Mapping[str, str] | None) -> dict[str, Preference]:
    given = {name: Preference(distribution, "argument") for name, distribution in (prefer or {}).items()}
    return {**settings.prefer, **given}


def _described(error: BaseException) -> str:
    """Type and message in one line; our own errors speak for themselves."""
    return one_line(error) if isinstance(error, PluginError) else one_line_with_type(error)


def _subject(found: _Found) -> str:
    owner = found.owner
    return f"plugin {owner.plugin!r} of {owner.distribution} {owner.version}".rstrip()


def _report(plugins: Plugins, selection: _Selection, trace: Trace) -> None:
    """What happened, into the trace; what a user should look at, also into the log."""
    import logging

    log = logging.getLogger("modelbay.plugins")
    rejected = [Rejected(str(record), f"failed: {record.error}") for record in plugins.failed]
    rejected += [Rejected(str(record), f"not selected ({selection.source})") for record in plugins.disabled]
    trace.decide("plugins", "loaded", plugins.manifest(), selection.source, rejected=tuple(rejected))
    for record in plugins.failed:
        log.warning("plugin %s skipped: %s", record, record.error)
        trace.warn("plugins", f"plugin {record.name}", f"skipped: {record.error}", str(record))
    for name in _unknown(plugins, selection):
        import difflib

        known = sorted({record.name for record in plugins.records})
        near = difflib.get_close_matches(name, known, n=1)
        message = f"no plugin {name!r} is installed; " + (
            f"nearest: {near[0]}" if near else f"known: {', '.join(known)}"
        )
        log.warning("%s (%s)", message, selection.source)
        trace.warn("plugins", f"plugin {name}", message, selection.source)


def _unknown(plugins: Plugins, selection: _Selection) -> list[str]:
    known = {record.name for record in plugins.records}
    known |= {canonical(record.distribution) for record in plugins.records}
    return [name for name in selection.names or () if name not in known and canonical(name) not in known]
