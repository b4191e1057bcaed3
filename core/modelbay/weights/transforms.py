"""A checkpoint's names and shapes to the model's, as data. No torch: the loader applies them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rename:
    """Regular expression on the whole name (``re.sub``): ``Rename(r"^backbone\\.", "model.")``."""

    pattern: str
    replacement: str


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor on disk is several in the model: cut along ``dim`` into ``sizes`` (rows; -1 entries not allowed).

    ``names`` replace the match of ``pattern`` in the name, in order. ``sizes`` may be strings of
    facts of the config ("q_size", "kv_size", "intermediate_size"), resolved when the transforms are compiled.
    """

    pattern: str
    names: tuple[str, ...]
    sizes: tuple[int | str, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """Several tensors on disk are one in the model: stacked on a new ``dim``, in the order of the number that the
    pattern's group ``index`` captures: ``Stack(r"experts\\.(?P<index>\\d+)\\.up\\.weight", "experts.up")``."""

    pattern: str
    replacement: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap two dimensions of every tensor whose name matches (GPT-2's Conv1D)."""

    pattern: str
    dims: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Reshape:
    """Undo a row permutation: view as ``shape``, permute by ``order``, flatten back. Entries of ``shape`` are sizes or
    names of config facts ("num_heads", "num_kv_heads"); one may be -1. GGUF's llama q/k rows need it."""

    pattern: str
    shape: tuple[int | str, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ignore:
    """Tensors that are not parameters, under a rule that has a name (shown in the LoadReport)."""

    pattern: str
    rule: str


Transform = Rename | Split | Stack | Transpose | Reshape | Ignore
