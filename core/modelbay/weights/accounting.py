"""The LoadReport: what became of every tensor on disk, and where every parameter came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

from modelbay.weights.formats import TensorEntry


@dataclass(slots=True)
class TensorUse:
    """What became of one tensor on disk.

    ``targets`` are the model's names it went into; ``rule`` says why a tensor was ignored.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    status: Literal["pending", "loaded", "tied", "ignored"] = "pending"
    targets: list[str] = field(default_factory=list)
    rule: str | None = None


@dataclass(slots=True)
class ParameterUse:
    """Where one parameter, section of a packed parameter, or persistent buffer came from.

    ``parameter`` is its name in the module; ``sources`` are (file, tensor) pairs; ``status`` "initialised" marks what
    had no tensor and was made up (``load_format=dummy``, or ``strict`` off); "kept" a buffer that stays as built.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    dtype: str
    status: Literal["pending", "loaded", "tied", "initialised", "kept"] = "pending"
    sources: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class LoadReport:
    """The account of one load.

    Attributes:
        format: the load format; ``files``: what it read.
        tensors: by name on disk; ``parameters``: by logical name.
        casts: ``"float32 -> bfloat16"`` to the number of tensors converted.
        bytes_read: of the tensors used, or of the slices of them that this rank has, on disk; ``bytes_model``: of the
            parameters and buffers filled.
        seconds: wall clock.
    """

    format: str
    files: tuple[str, ...] = ()
    tensors: dict[str, TensorUse] = field(default_factory=dict)
    parameters: dict[str, ParameterUse] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_model: int = 0
    seconds: float = 0.0

    def add_entries(self, entries: Iterable[TensorEntry]) -> None:
        """Open an account for every tensor on disk."""
        for entry in entries:
            self.tensors[entry.name] = TensorUse(entry.name, entry.file, entry.shape, entry.dtype, entry.nbytes)

    def loaded(self, tensor: str, target: str, *, made_up: bool = False) -> None:
        """(A part of) ``tensor`` went into the parameter or section ``target``."""
        use, parameter = self.tensors[tensor], self.parameters[target]
        use.status = "loaded"
        use.targets.append(target)
        parameter.status = "initialised" if made_up else "loaded"
        parameter.sources.append((use.file, tensor))

    def read(self, tensor: str, elements: int) -> None:
        """So many values of ``tensor`` were read."""
        use = self.tensors[tensor]
        self.bytes_read += use.nbytes * elements // max(1, prod(use.shape))

    def tied(self, tensor: str, target: str) -> None:
        """``tensor`` equals the parameter that the tied ``target`` shares."""
        use = self.tensors[tensor]
        use.status = "tied"
        use.targets.append(target)

    def ignored(self, tensor: str, rule: str) -> None:
        """``tensor`` (or what a split made of it) is not used, by a rule that has a name."""
        use = self.tensors[tensor]
        if use.status == "pending":
            use.status, use.rule = "ignored", rule

    def cast(self, source: str, target: str) -> None:
        if source != target:
            key = f"{source} -> {target}"
            self.casts[key] = self.casts.get(key, 0) + 1

    def unaccounted(self) -> list[str]:
        """Tensors and parameters without a verdict; empty after a load that went as planned."""
        tensors = [f"tensor {use.name}" for use in self.tensors.values() if use.status == "pending"]
        return tensors + [f"parameter {use.name}" for use in self.parameters.values() if use.status == "pending"]

    def ignored_by_rule(self) -> dict[str, int]:
        """Rule to the number of tensors that it covers."""
        counts: dict[str, int] = {}
        for use in self.tensors.values():
            if use.status == "ignored":
                rule = use.rule or "?"
                counts[rule] = counts.get(rule, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self) | {"ignored_by_rule": self.ignored_by_rule()}

    def summary(self) -> str:
        """One line: how much, from where, in which time, and what was not used."""
        count = sum(use.status == "loaded" for use in self.tensors.values())
        parts = [f"{count} tensors ({_size(self.bytes_model)}) as {self.format} in {self.seconds:.2f} s"]
        if self.casts:
            parts.append("cast " + ", ".join(f"{count} {key}" for key, count in sorted(self.casts.items())))
        tied = sum(use.status == "tied" for use in self.parameters.values())
        if tied:
            parts.append(f"{tied} tied")
        made_up = sum(use.status == "initialised" for use in self.parameters.values())
        if made_up and self.format != "dummy":
            parts.append(f"{made_up} initialised, not loaded")
        parts += [f"{count} ignored ({rule})" for rule, count in sorted(self.ignored_by_rule().items())]
        return "; ".join(parts)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
