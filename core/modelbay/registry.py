"""What the plugins registered, looked up by name: owners, conflicts, choices. Plain data, no discovery here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from modelbay.errors import PluginConflictError, PluginError, UnknownNameError
from modelbay.specs import Owner

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

#: The distribution shown for a plugin that was given as a module and belongs to no installed distribution.
IN_PROCESS = "(in-process)"


def canonical(distribution: str) -> str:
    """The normal form in which distribution names are compared (the packaging specification's)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True)
class Owned(Generic[T]):
    """A registered record and who registered it."""

    value: T
    owner: Owner


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin.

    Args:
        name: the entry point's name, or the module's for a plugin given in-process.
        distribution, version: of the distribution that brought it.
        target: the module (``"package.plugin"``).
        status: "disabled" means that it was not selected, so that it was not even imported.
        hooks: the hooks it implements.
        error: ``"ImportError: …"`` for a failed one.
        offers: per table, the names it has; for a failed plugin those that could still be read.
    """

    name: str
    distribution: str
    version: str
    target: str
    status: Literal["loaded", "failed", "disabled"]
    hooks: tuple[str, ...] = ()
    error: str | None = None
    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip() + f" (entry point {self.name!r})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "target": self.target,
            "status": self.status,
            "hooks": list(self.hooks),
            "offers": {table: list(names) for table, names in self.offers.items()},
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Preference:
    """The choice of one distribution for one name, and where the choice was made."""

    distribution: str
    source: str

    def chooses(self, owner: Owner) -> bool:
        """A plugin without a distribution is chosen by its module's name."""
        return canonical(self.distribution) == canonical(owner.distribution) or self.distribution == owner.plugin


class Plugins:
    """The loaded plugins and everything they registered. Immutable, and independent of load order."""

    def __init__(
        self,
        records: Iterable[PluginRecord],
        registered: Mapping[str, Iterable[Owned[Any]]],
        prefer: Mapping[str, Preference] | None = None,
        selected_by: str = "default",
    ) -> None:
        self.records: tuple[PluginRecord, ...] = tuple(sorted(records, key=lambda r: (r.distribution, r.name)))
        self._tables = {table: _sorted(table, registered.get(table, ())) for table in TABLES}
        self._prefer = dict(prefer or {})
        self._selected_by = selected_by

    @property
    def failed(self) -> tuple[PluginRecord, ...]:
        return tuple(record for record in self.records if record.status == "failed")

    @property
    def disabled(self) -> tuple[PluginRecord, ...]:
        return tuple(record for record in self.records if record.status == "disabled")

    def all(self, table: str) -> list[Owned[Any]]:
        """Every record of the table, by name then owner (independent of load order)."""
        return list(self._tables[table])

    def names(self, table: str) -> list[str]:
        """The names in the table, sorted, each once."""
        key = TABLES[table]
        return list(dict.fromkeys(getattr(owned.value, key) for owned in self._tables[table]))

    def owners(self, table: str, name: str) -> list[Owned[Any]]:
        """Every record of this name, by owner; no choice is made."""
        key = TABLES[table]
        return [owned for owned in self._tables[table] if getattr(owned.value, key) == name]

    def preference(self, name: str) -> Preference | None:
        """Whom the user chose for this name, and where."""
        return self._prefer.get(name)

    def get(self, table: str, name: str) -> Owned[Any] | None:
        """The record of this name, or None.

        Raises:
            PluginConflictError: two plugins own it and no preference chose; names both.
            PluginError: the preferred distribution does not offer the name.
        """
        assert table != "kernels", "an op has many kernels: use all()"
        owners = self.owners(table, name)
        preference = self._prefer.get(name)
        if owners and preference:
            owners = self._preferred(table, name, owners, preference)
        if len(owners) > 1:
            raise _conflict(table, name, owners)
        return owners[0] if owners else None

    def require(self, table: str, name: str, what: str) -> Owned[Any]:
        """Like `get`, but absent is a `PluginError` naming ``what``, the nearest names, and any failed plugin."""
        owned = self.get(table, name)
        if owned is None:
            raise PluginError(f"no installed plugin offers the {what} {name!r}.", hint=self.absent_hint(table, name))
        return owned

    def named(self, table: str, name: str, what: str) -> Owned[Any]:
        """Like `require`, for a name that an argument gave: the user's mistake, unless a plugin that failed has it.

        Raises:
            UnknownNameError: no plugin has it.
            PluginError: one that failed to load does.
        """
        owned = self.get(table, name)
        if owned is None:
            failed = any(name in record.offers.get(table, ()) for record in self.failed)
            kind = PluginError if failed else UnknownNameError
            raise kind(f"no installed plugin offers the {what} {name!r}.", hint=self.absent_hint(table, name))
        return owned

    def absent_hint(self, table: str, name: str) -> str:
        """What to do about a name that no loaded plugin offers: nearest names, failed and disabled plugins."""
        parts = [self._near_hint(table, name)]
        offering = [record for record in self.failed if name in record.offers.get(table, ())]
        if offering:
            parts += [f"{record} offers it but failed to load: {record.error}." for record in offering]
        elif self.failed:
            listed = "; ".join(f"{record}: {record.error}" for record in self.failed)
            parts.append(f"A plugin that failed to load may offer it: {listed}.")
        if self.disabled:
            listed = ", ".join(f"{record.name} ({record.distribution})" for record in self.disabled)
            parts.append(f"Installed but not loaded ({self._selected_by}): {listed}.")
        return " ".join(part for part in parts if part)

    def manifest(self) -> dict[str, str]:
        """``{entry point: "distribution version"}``, what every process of a run must agree on.

        Two distributions with an entry point of the same name stand side by side, separated by a comma.
        """
        owners: dict[str, list[str]] = {}
        for record in self.records:
            if record.status == "loaded":
                owners.setdefault(record.name, []).append(f"{record.distribution} {record.version}".rstrip())
        return {name: ", ".join(sorted(owners[name])) for name in sorted(owners)}

    def _preferred(self, table: str, name: str, owners: list[Owned[Any]], preference: Preference) -> list[Owned[Any]]:
        chosen = [owned for owned in owners if preference.chooses(owned.owner)]
        if chosen:
            return chosen
        if any(preference.chooses(o.owner) for other in TABLES if other != "kernels" for o in self.owners(other, name)):
            return owners  # the choice was about another table's record of this name
        listed = ", ".join(str(owned.owner) for owned in owners)
        raise PluginError(
            f"{preference.distribution!r} is preferred for {name!r} (by {preference.source}) but does not offer it; "
            f"offered by: {listed}.",
            hint=self._why_absent(preference.distribution),
        )

    def _why_absent(self, distribution: str) -> str:
        for record in self.records:
            if canonical(record.distribution) == canonical(distribution) and record.status != "loaded":
                why = f"failed to load: {record.error}" if record.error else f"is not loaded ({self._selected_by})"
                return f"{record} {why}."
        return "Prefer one of these, or remove the preference."

    def _near_hint(self, table: str, name: str) -> str:
        import difflib

        names = self.names(table)
        near = difflib.get_close_matches(name, names, n=3)
        if near:
            return f"Nearest: {', '.join(near)}."
        if not names:
            return "No plugin that is loaded offers any."
        return f"Offered: {', '.join(names)}." if len(names) <= 12 else ""


def _sorted(table: str, registered: Iterable[Owned[Any]]) -> list[Owned[Any]]:
    """By name then owner; equal records of one distribution, found twice on the path, count once."""
    key = TABLES[table]
    ordered = sorted(registered, key=lambda o: (getattr(o.value, key), canonical(o.owner.distribution), o.owner.plugin))
    unique: list[Owned[Any]] = []
    for owned in ordered:
        if not any(_same(owned, other) for other in unique):
            unique.append(owned)
    return unique


def _same(a: Owned[Any], b: Owned[Any]) -> bool:
    same_owner = a.owner.distribution == b.owner.distribution
    if a.owner.distribution == IN_PROCESS:
        same_owner = a.owner.plugin == b.owner.plugin
    return same_owner and a.value == b.value


def _conflict(table: str, name: str, owners: list[Owned[Any]]) -> PluginConflictError:
    what = table.replace("_", " ")
    listed = " and ".join(f"{owned.owner} (entry point {owned.owner.plugin!r})" for owned in owners)
    distributions = dict.fromkeys(
        owned.owner.plugin if owned.owner.distribution == IN_PROCESS else owned.owner.distribution for owned in owners
    )
    if len(distributions) == 1:
        distributions = dict.fromkeys(owned.owner.plugin for owned in owners)
    choices = " or ".join(f"--prefer {name}={distribution}" for distribution in distributions)
    return PluginConflictError(
        f"{name!r} ({what}) is registered by {listed}.",
        hint=f"Choose with {choices} (or prefer=, MODELBAY_PREFER, or [prefer] in the config file).",
    )
