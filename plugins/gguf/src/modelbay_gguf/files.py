"""Which .gguf files make up one model: a single file, or the shards of a split one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from modelbay.errors import WeightsError
from modelbay.source import ModelFiles

SUFFIX = ".gguf"
SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def select(files: ModelFiles) -> tuple[str, ...]:
    """The names of the model's files, shards in order; empty if there is no .gguf file.

    Raises:
        WeightsError: several models lie there and none was named, or a shard is absent.
    """
    if files.entry is not None:
        return model_of(files.entry, files.names) if files.entry.endswith(SUFFIX) else ()
    # A projector (mmproj) belongs to a vision tower and is never the language model.
    candidates = [name for name in files.names if name.endswith(SUFFIX) and "mmproj" not in name.lower()]
    models = {model_of(name, candidates) for name in candidates}
    if len(models) > 1:
        found = ", ".join(sorted(model[0] for model in models))
        raise WeightsError(
            f"{files.reference} holds {len(models)} GGUF models: {found}.", hint="Give the path of one of the files."
        )
    return models.pop() if models else ()


def model_of(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """The files of the model that ``name`` is one file of, in shard order.

    Raises:
        WeightsError: a shard is not among ``names``; the message names it.
    """
    match = SHARD.match(name)
    if match is None:
        return (name,)
    count, present = int(match["count"]), set(names)
    shards = tuple(f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1))
    absent = [shard for shard in shards if shard not in present]
    if absent:
        raise WeightsError(f"{name} is one of {count} shards, and these are absent: {', '.join(absent)}.")
    return shards


def local_shards(path: Path) -> tuple[Path, ...]:
    """The local files of the model that ``path`` is one file of.

    Raises:
        WeightsError: a shard does not lie beside it.
    """
    names = model_of(path.name, (sibling.name for sibling in path.parent.iterdir()))
    return tuple(path.parent / name for name in names)
