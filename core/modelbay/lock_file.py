"""The form of a lock file, checked value by value: what was edited by hand is refused with the place that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from modelbay.checked_json import (
    check,
    check_commit,
    check_files,
    check_format,
    check_keys,
    check_object,
    is_none_or,
    parse,
)

FORMAT = 1
SECTIONS = ("model", "tokenizer", "code", "args", "resolution", "versions", "plugins")
_ENTRY = ("reference", "repository", "commit", "files")

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def to_json(data: Mapping[str, Any]) -> str:
    text = json.dumps({"format": FORMAT, **data}, indent=1, ensure_ascii=False) + "\n"
    # A directory's name may be no UTF-8; what stands for its bytes is written as JSON escapes it.
    return text.encode("utf-8", "backslashreplace").decode()


def from_json(text: str, settings: Collection[str]) -> dict[str, Any]:
    """The sections of a lock file. A setting that is null is not said.

    Args:
        settings: the engine arguments that a lock may pin.

    Raises:
        ValueError: it is no lock; says where.
    """
    data = parse(text)
    check_keys(data, "the file", ("format", *SECTIONS))
    check_format(data["format"], FORMAT)
    _check_entry(data["model"], "model")
    if data["tokenizer"] is not None:
        _check_entry(data["tokenizer"], "tokenizer")
    check(data["code"], "code", isinstance(data["code"], list), "a list")
    for number, entry in enumerate(data["code"]):
        _check_entry(entry, f"code[{number}]", "of")
        check(entry["of"], f"code[{number}].of", entry["of"] in ("model", "tokenizer"), "model or tokenizer")
    data["args"] = {name: value for name, value in check_object(data["args"], "args").items() if value is not None}
    for name, value in data["args"].items():
        _check_setting(name, value, settings)
    for name, value in check_object(data["resolution"], "resolution").items():
        check(value, f"resolution.{name}", value is None or type(value) in (str, int), "text, a number or null")
    for section in ("versions", "plugins"):
        for name, value in check_object(data[section], section).items():
            check(value, f"{section}.{name}", isinstance(value, str), "text")
    return {section: data[section] for section in SECTIONS}


def _check_setting(name: str, value: Any, settings: Collection[str]) -> None:
    """As the engine arguments check it, wherever it is written."""
    from modelbay.args import EngineArgs
    from modelbay.errors import UsageError

    if name not in settings:
        raise ValueError(f"args has {name!r}, which no lock pins (it pins {', '.join(settings)})")
    if name == "dtype":  # where Python also takes torch's own objects
        check(value, "args.dtype", isinstance(value, str), "a string")
    try:
        EngineArgs.create("", **{name: value})
    except UsageError as error:
        raise ValueError(f"args.{error.message.removesuffix('.')}") from error


def _check_entry(value: Any, where: str, *more: str) -> None:
    """A repository or directory, and what is used of it."""
    check_keys(value, where, (*_ENTRY, *more))
    reference, repository = value["reference"], value["repository"]
    check(reference, f"{where}.reference", reference is None or isinstance(reference, str), "text or null")
    check(repository, f"{where}.repository", is_none_or(repository, _REPOSITORY), "a hub id or null")
    check_commit(value["commit"], f"{where}.commit")
    check_files(value["files"], f"{where}.files")
