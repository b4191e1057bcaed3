"""Which files a checkpoint consists of: the index decides; without one, those of the standard names in the root
folder; without those, every file there that ends like weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeVar

from modelbay.errors import WeightsError
from modelbay.trace import Rejected, Trace

if TYPE_CHECKING:
    from modelbay.source import ModelFiles

E = TypeVar("E")

#: Files that end like weights and are not this model's weights: copies in another layout, adapters, and what a
#: trainer writes to go on from (Transformers, accelerate, DeepSpeed, torchtune).
NOT_WEIGHTS = (
    "consolidated*",
    "adapter_*",
    "training_args*",
    "training_state*",
    "trainer_*",
    "train_state*",
    "recipe_state*",
    "optimizer*",
    "optim.*",
    "optim_*",
    "*_optim_states*",
    "scheduler*",
    "lr_scheduler*",
    "scaler*",
    "grad_scaler*",
    "sampler*",
    "dl_state_dict*",
    "rng_state*",
    "random_states*",
    "tokenizer*",
)
#: The numbers of a shard, as every writer of shards has them.
SHARD = f"-{'[0-9]' * 5}-of-{'[0-9]' * 5}"


@dataclass(frozen=True, slots=True)
class FileNames:
    """By which names one format's files go.

    Args:
        indexes: names of index files, the preferred one first.
        whole: the standard name of a checkpoint in one file. Beside an index that does not name it, it is another
            checkpoint.
        patterns: groups of patterns, tried in order without an index; the first group that matches files in the root
            folder decides. Standard names come first: what lies beside them, as a copy in another dtype
            (``model.fp16.safetensors``), is not meant.
    """

    indexes: tuple[str, ...]
    whole: str
    patterns: tuple[tuple[str, ...], ...]

    @property
    def every(self) -> tuple[str, ...]:
        """All patterns."""
        return tuple(pattern for group in self.patterns for pattern in group)


def select_files(files: ModelFiles, names: FileNames) -> tuple[str, ...]:
    """The weight files of one format, relative names, sorted.

    Raises:
        WeightsError: the index is malformed, or names files that are absent.
    """
    if files.entry is not None:
        return (files.entry,) if any(fnmatchcase(files.entry, pattern) for pattern in names.every) else ()
    for index in names.indexes:
        if files.has(index):
            return _indexed(files, index)
    for group in names.patterns:
        if found := _in_root(files, group):
            return found
    return ()


def trace_files(files: ModelFiles, names: FileNames, selected: Sequence[str], trace: Trace) -> None:
    """Say which files end like this format's weights, lie beside the selected ones, and are not read.

    A whole checkpoint in one file beside an index that does not name it is a warning: Transformers reads the file.
    """
    if files.entry is not None or not selected:
        return
    rest = [name for name in _in_root(files, names.every) if name not in selected]
    index = next((name for name in names.indexes if files.has(name)), None)
    if rest:
        reason = f"{index} decides, and does not name it" if index else "what is read has a standard name"
        rejected = tuple(Rejected(name, reason) for name in rest)
        level: Literal["info", "warning"] = "warning" if index and names.whole in rest else "info"
        aside = f"{shorten(selected, 3)}, not {shorten(rest, 3)}"
        trace.decide("weights", "files", aside, index or "names", rejected=rejected, level=level)


def weight_map(files: ModelFiles, index: str) -> dict[str, str]:
    """``{tensor: file}`` of an index file, checked.

    Raises:
        WeightsError: it is not of the form ``{"weight_map": {tensor: file}}``, or a file lies outside the model.
    """
    content = files.read_json(index) or {}
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(mapping, dict)
        or not mapping
        or not all(isinstance(tensor, str) and isinstance(file, str) for tensor, file in mapping.items())
    ):
        raise WeightsError(f"index {index} of {files.reference} has no weight_map of tensor and file names.")
    for name in set(mapping.values()):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise WeightsError(f"index {index} of {files.reference} names {name!r}, a file outside the model.")
    return mapping


def check_index(files: ModelFiles, indexes: tuple[str, ...], tensors: Mapping[str, str]) -> None:
    """Every tensor that the index promises is in the file that it names (``tensors``: name to file).

    Raises:
        WeightsError: naming the tensors that are not.
    """
    index = next((name for name in indexes if files.entry is None and files.has(name)), None)
    if index is None:
        return
    wrong = sorted(name for name, file in weight_map(files, index).items() if tensors.get(name) != file)
    if wrong:
        raise WeightsError(
            f"index {index} of {files.reference} promises tensors that its files do not hold: {shorten(wrong)}.",
            hint="Index and files come from different checkpoints; fetch both again.",
        )


def merge_entries(per_file: Iterable[tuple[str, Iterable[E]]], name_of: Callable[[E], str]) -> dict[str, E]:
    """One table of all files' tensors, in file order then data order.

    Raises:
        WeightsError: two files hold a tensor of the same name.
    """
    merged: dict[str, E] = {}
    owner: dict[str, str] = {}
    for file, entries in per_file:
        for entry in entries:
            name = name_of(entry)
            if name in merged:
                raise WeightsError(
                    f"tensor {name!r} is in both {owner[name]} and {file}.",
                    hint="Keep one set of weight files, or add the index file that says which are meant.",
                )
            merged[name], owner[name] = entry, file
    return merged


def shorten(names: Iterable[str], limit: int = 8) -> str:
    """A list of names for an error message: the first few, none of them endless, and how many more."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name if len(name) <= 300 else f"{name[:299]}…" for name in names[:limit]) + more


def _indexed(files: ModelFiles, index: str) -> tuple[str, ...]:
    named = sorted(set(weight_map(files, index).values()))
    absent = [name for name in named if not files.has(name)]
    if absent:
        raise WeightsError(
            f"index {index} of {files.reference} names files that are not there: {shorten(absent)}.",
            hint="Download the missing files, or remove the index if it is stale.",
        )
    return tuple(named)


def _in_root(files: ModelFiles, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Weight files in the root folder that match one of the patterns, sorted."""
    root = (name for name in files.names if "/" not in name and not _excluded(name))
    return tuple(sorted(name for name in root if any(fnmatchcase(name, pattern) for pattern in patterns)))


def _excluded(name: str) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in NOT_WEIGHTS)
