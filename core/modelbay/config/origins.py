"""Where every value of a config stands: in the checkpoint's file, in the argument over it, or in what repaired it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelbay.rope import PARTIAL_KEYS, ROPE_DICTS, THETA_KEYS

Path = tuple[str, ...]
CONFIG_FILE = "config.json"
#: Keys of which each may say what another one means.
_SAME_FACT = (THETA_KEYS, PARTIAL_KEYS, ("rope_type", "type"))


@dataclass(slots=True)
class Origins:
    """The sources of a config's values, followed through overrides and patches.

    Args:
        file: the file that the config was read from.
        elsewhere: path of a value -> its source, for all that do not stand in the file under the same keys.
        reader: what made the config of a file that is none itself; then only what is in ``elsewhere`` has keys there.
    """

    file: str = CONFIG_FILE
    elsewhere: dict[Path, str] = field(default_factory=dict)
    reader: str = ""

    def of(self, path: Path, value: Any = None) -> str:
        """The source of the value at ``path``; of an object, those of all that is in it."""
        if path in self.elsewhere:
            return self.elsewhere[path]
        if isinstance(value, Mapping) and value and any(known[: len(path)] == path for known in self.elsewhere):
            found = [(leaf, self.of((*path, *leaf))) for leaf, _ in leaves(value)]
            own = [source for leaf, source in found if source == self._own((*path, *leaf))]
            rest = [source for _, source in found if source not in own]
            return joined(([self._own(path)] if own else []) + rest)
        return self._own(path)

    def follow(self, before: Mapping[str, Any], after: Mapping[str, Any], source: Callable[[Path], str]) -> None:
        """Note the source of every value that is new or another one in ``after``."""
        old = dict(leaves(before))
        changes = {
            path: source(path) for path, value in leaves(after) if path not in old or not _same(old[path], value)
        }
        now = {path for path, _ in leaves(after)}
        for gone in [path for path in self.elsewhere if path not in now]:
            del self.elsewhere[gone]
        self.elsewhere |= changes

    def override(
        self, before: Mapping[str, Any], after: Mapping[str, Any], overrides: Mapping[str, Any], argument: str
    ) -> None:
        """``after`` is ``before`` with ``overrides`` merged into it. What they say is theirs, changed or not."""

        def source(path: Path) -> str:
            said = _said_at(overrides, path)
            where = f"{argument} ({'.'.join(said)})"
            return where if said == path or _at(overrides, said) is not None else f"derived: null in {where}"

        self.follow(before, after, source)
        now = dict(leaves(after))
        self.elsewhere |= {path: source(path) for path, value in leaves(overrides) if _is_at(now, path, value)}

    def patch(self, before: Mapping[str, Any], after: Mapping[str, Any], level: Path, source: str) -> None:
        """A patch made ``after`` of ``before``, both at ``level``."""
        self._at_level(before, after, level, lambda path: f"derived: {source}")

    def normalise(self, before: Mapping[str, Any], after: Mapping[str, Any], level: Path) -> None:
        """The same for RoPE's normal form, which says under one key what stood under another: that is its source."""
        old = dict(leaves(before))
        values = dict(leaves(after))
        sources = {path: self.of((*level, *path)) for path in old}

        def source(path: Path) -> str:
            for other in _spellings(path):
                if other in old and old[other] is not None:
                    where = sources[other]
                    return where if _same(old[other], values[path]) else f"derived: {old[other]!r} of {where}"
            return "derived: normal form of RoPE"

        self._at_level(before, after, level, source)

    def reading(self, values: Mapping[str, Any], keys: Mapping[str, str]) -> Origins:
        """These, of values that a load format read: ``keys`` says under which key of the file each stands, or that it
        is derived (``"derived: …"``); keys of objects count for all that is in them."""
        for path, _ in leaves(values):
            known = (keys.get(".".join(path[:depth])) for depth in range(len(path), 0, -1))
            key = next(filter(None, known), None)
            if key is not None:
                self.elsewhere[path] = key if key.startswith("derived: ") else f"{self.file} ({key})"
        return self

    def _at_level(
        self, before: Mapping[str, Any], after: Mapping[str, Any], level: Path, source: Callable[[Path], str]
    ) -> None:
        inner = Origins(elsewhere={path[len(level) :]: said for path, said in self._below(level).items()})
        inner.follow(before, after, source)
        for path in self._below(level):
            del self.elsewhere[path]
        self.elsewhere |= {(*level, *path): said for path, said in inner.elsewhere.items()}

    def _below(self, level: Path) -> dict[Path, str]:
        return {path: said for path, said in self.elsewhere.items() if path[: len(level)] == level}

    def _own(self, path: Path) -> str:
        return f"derived: by {self.reader}, from {self.file}" if self.reader else f"{self.file} ({'.'.join(path)})"


def leaves(values: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no object, or an empty one, by the keys that lead there."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def joined(sources: list[str]) -> str:
    """Several sources in one line, each once."""
    return "; ".join(dict.fromkeys(sources))


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _at(values: Mapping[str, Any], path: Path) -> Any:
    found: Any = values
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _is_at(values: Mapping[Path, Any], path: Path, value: Any) -> bool:
    return path in values and _same(values[path], value)


def _said_at(overrides: Mapping[str, Any], path: Path) -> Path:
    """The keys of the overrides that made the value at ``path`` what it is: the same, or other names for RoPE's."""
    level: Any = overrides
    rope: Path | None = None
    for depth, key in enumerate(path):
        if not isinstance(level, Mapping):
            return path[:depth]
        if key in (*ROPE_DICTS, *THETA_KEYS, *PARTIAL_KEYS):
            rope = _rope_key(level, path[:depth], path[depth:])
        if key not in level:
            return rope or path
        level = level[key]
    return path


def _rope_key(level: Mapping[str, Any], above: Path, rest: Path) -> Path | None:
    said = dict(leaves(level))
    for other in _spellings(rest):
        if said.get(other) is not None:
            return (*above, *other)
    # A null takes the scaling away, whatever is left of it then.
    return next(((*above, key) for key in ROPE_DICTS if key in level), None)


def _spellings(path: Path) -> Iterator[Path]:
    """Where the value at ``path`` may have stood before RoPE's normal form: under other names, inside or beside."""
    yield path
    family = next((names for names in _SAME_FACT if path[-1] in names), (path[-1],))
    inside = path[0] in ROPE_DICTS
    for holder in ROPE_DICTS if inside else ():
        for name in dict.fromkeys((path[-1], *family)):
            yield (holder, *path[1:-1], name)
    if family in (THETA_KEYS, PARTIAL_KEYS):
        yield from ((name,) for name in reversed(family))
        if not inside:
            yield from ((holder, family[0]) for holder in ROPE_DICTS)
