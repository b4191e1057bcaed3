"""Discovery, isolation, provenance and choice of plugins. No process-wide state: every caller holds its `Plugins`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, Literal, TypeVar

from modelbay.specs import Owner
from modelbay.trace import Trace

T = TypeVar("T")

#: What can be registered: table name -> the field that is the record's name. The hook is ``register_<table>``.
TABLES = {
    "architectures": "name",
    "config_classes": "model_type",
    "config_patches": "name",
    "tokenizer_modes": "name",
    "load_formats": "name",
    "modeling_backends": "name",
    "attention_kinds": "name",
    "kernels": "op",  # several owners of one op are the point: never a conflict
    "quantizations": "method",
    "commands": "name",
}


@dataclass(frozen=True, slots=True)
class Owned(Generic[T]):
    """A registered record and who registered it."""

    value: T
    owner: Owner


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin."""

    name: str  # entry point name, or module name for in-process plugins
    distribution: str
    version: str
    target: str  # the module
    status: Literal["loaded", "failed", "disabled"]
    hooks: tuple[str, ...] = ()
    error: str | None = None  # "ImportError: …" for failed ones


class Plugins:
    """The loaded plugins and everything they registered."""

    records: tuple[PluginRecord, ...]

    def get(self, table: str, name: str) -> Owned | None:
        """The record of this name, or None.

        Raises:
            PluginConflictError: two distributions own it and no preference chose; names both.
        """
        raise NotImplementedError

    def require(self, table: str, name: str, what: str) -> Owned:
        """Like `get`, but absent is a `PluginError` naming ``what``, the nearest names, and any failed plugin."""
        raise NotImplementedError

    def all(self, table: str) -> list[Owned]:
        """Every record of the table, by name then owner (independent of load order)."""
        raise NotImplementedError

    def names(self, table: str) -> list[str]:
        raise NotImplementedError

    def manifest(self) -> dict[str, str]:
        """``{entry point: "distribution version"}``, what every process of a run must agree on."""
        raise NotImplementedError


def load_plugins(
    names: Sequence[str | ModuleType] | None = None,
    *,
    prefer: Mapping[str, str] | None = None,
    strict: bool = False,
    trace: Trace | None = None,
) -> Plugins:
    """Load installed plugins (and modules given in-process) into a fresh manager.

    ``names``: None reads MODELBAY_PLUGINS (unset: all; empty: none); strings select entry points; modules add plugins.
    """
    raise NotImplementedError
