"""The form of a lock file, checked value by value: what was edited by hand is refused with the place that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

FORMAT = 1
SECTIONS = ("model", "tokenizer", "code", "args", "resolution", "versions", "plugins")
_ENTRY = ("reference", "repository", "commit", "files")

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def to_json(data: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **data}, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, settings: Collection[str]) -> dict[str, Any]:
    """The sections of a lock file.

    Args:
        settings: the engine arguments that a lock may pin.

    Raises:
        ValueError: it is no lock; says where.
    """
    data = json.loads(text, object_pairs_hook=_unique)
    _keys(data, "the file", ("format", *SECTIONS))
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, this version reads {FORMAT}")
    _entry(data["model"], "model")
    if data["tokenizer"] is not None:
        _entry(data["tokenizer"], "tokenizer")
    if not isinstance(data["code"], list):
        raise ValueError(f"code must be a list, got {data['code']!r}")
    for number, entry in enumerate(data["code"]):
        _entry(entry, f"code[{number}]", "of")
        _value(entry["of"], f"code[{number}].of", entry["of"] in ("model", "tokenizer"), "model or tokenizer")
    for name in _object(data["args"], "args"):
        if name not in settings:
            raise ValueError(f"args has {name!r}, which no lock pins (it pins {', '.join(settings)})")
    for name, value in _object(data["resolution"], "resolution").items():
        _value(value, f"resolution.{name}", value is None or type(value) in (str, int), "text, a number or null")
    for section in ("versions", "plugins"):
        for name, value in _object(data[section], section).items():
            _value(value, f"{section}.{name}", isinstance(value, str), "text")
    return {section: data[section] for section in SECTIONS}


def _entry(value: Any, where: str, *more: str) -> None:
    """A repository or directory, and what is used of it."""
    _keys(value, where, (*_ENTRY, *more))
    reference, repository, commit = value["reference"], value["repository"], value["commit"]
    _value(reference, f"{where}.reference", reference is None or isinstance(reference, str), "text or null")
    _value(repository, f"{where}.repository", _is(repository, _REPOSITORY), "a hub id or null")
    _value(commit, f"{where}.commit", _is(commit, _COMMIT), "a full commit (40 hexadecimal digits) or null")
    for name, digest in _object(value["files"], f"{where}.files").items():
        path = PurePosixPath(name)
        inside = bool(name) and not path.is_absolute() and ".." not in path.parts
        _value(name, f"a name in {where}.files", inside, "a path inside the model")
        _value(digest, f"{where}.files[{name!r}]", digest is not None and _is(digest, _SHA256), "a SHA-256")


def _is(value: Any, pattern: re.Pattern[str]) -> bool:
    return value is None or (isinstance(value, str) and pattern.fullmatch(value) is not None)


def _value(value: Any, where: str, right: bool, wanted: str) -> None:
    if not right:
        raise ValueError(f"{where} must be {wanted}, got {value!r}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {value!r}")
    return value


def _keys(value: Any, where: str, keys: tuple[str, ...]) -> None:
    unknown = sorted(_object(value, where).keys() - set(keys))
    absent = [key for key in keys if key not in value]
    if unknown or absent:
        said = f"unknown key {unknown[0]!r}" if unknown else f"no key {absent[0]!r}"
        raise ValueError(f"{where} has {said}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found
