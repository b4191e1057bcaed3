"""A checkpoint's names and shapes to the model's, as data. No torch: the loader applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rename:
    """Regular expression on the whole name (``re.sub``): ``Rename(r"^backbone\\.", "model.")``.

    ``count`` limits it to that many matches from the left; 0 is all of them.
    """

    pattern: str
    replacement: str
    count: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor on disk is several in the model: cut along ``dim`` into ``sizes`` (rows; -1 entries not allowed).

    ``names`` replace the match of ``pattern`` in the name, in order. ``sizes`` may be strings of
    facts of the config ("q_size", "kv_size", "intermediate_size"), resolved when the transforms are applied; or, for
    all of them, ``"equal"`` or ``"model"``: what the model's parameters of these names have along ``dim``.
    """

    pattern: str
    names: tuple[str, ...]
    sizes: tuple[int | str, ...] | Literal["equal", "model"]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Concat:
    """Several tensors on disk are one in the model, one after another along ``dim``: the reverse of `Split`.

    In the order of ``patterns``; tensors that one pattern matches, in the order of the number that its group ``index``
    captures. ``replacement`` replaces the match in each of their names and so says which belong together.
    """

    patterns: tuple[str, ...]
    replacement: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """Several tensors on disk are one in the model: stacked on a new ``dim``, in the order of the number that the
    pattern's group ``index`` captures: ``Stack(r"experts\\.(?P<index>\\d+)\\.up\\.weight", "experts.up")``."""

    pattern: str
    replacement: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Unstack:
    """One tensor on disk is as many in the model as it has entries along ``dim``, which they lack: the reverse of
    `Stack`. ``{index}`` in ``replacement`` is the entry's number: ``Unstack(r"experts\\.up$",
    "experts.{index}.up.weight")``."""

    pattern: str
    replacement: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap two dimensions of every tensor whose name matches (GPT-2's Conv1D).

    ``unless_fits``: only of those that have another shape than the model's parameter of that name.
    """

    pattern: str
    dims: tuple[int, int] = (0, 1)
    unless_fits: bool = False


@dataclass(frozen=True, slots=True)
class Reshape:
    """Undo a permutation: view as ``shape``, permute by ``order``, flatten back. Entries of ``shape`` are sizes or
    names of config facts ("num_heads", "num_kv_heads"); one may be -1. GGUF's llama q/k rows need it.

    With ``dim`` it is that dimension alone that is viewed as ``shape``; the others stay as they are.
    """

    pattern: str
    shape: tuple[int | str, ...]
    order: tuple[int, ...]
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class Dequantise:
    """Values times the scale of their block: every tensor of ``dtypes`` whose name matches, first of all transforms.

    ``scale`` replaces the match of ``pattern`` and names the tensor of scales: one for each block of ``block`` rows
    and columns, those at the ends included. ``Dequantise(r"\\.weight$", ".weight_scale", (128, 128))``.
    """

    pattern: str
    scale: str
    block: tuple[int, int]
    dtypes: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class Ignore:
    """Tensors that are not parameters, under a rule that has a name (shown in the LoadReport).

    ``unless_known``: names that the model has are not ignored.
    """

    pattern: str
    rule: str
    unless_known: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """``steps`` in a row, for those tensors alone whose name one of ``patterns`` is found in.

    ``within``: a regular expression for how the names begin; ``patterns`` and ``steps`` see what comes after it.
    """

    patterns: tuple[str, ...]
    steps: tuple[Transform, ...]
    within: str = ""


@dataclass(frozen=True, slots=True)
class FirstOf:
    """Each tensor goes through the first of ``chains`` that it is for, and through no other."""

    chains: tuple[Chain, ...]


Transform = Rename | Split | Concat | Stack | Unstack | Transpose | Reshape | Dequantise | Ignore | Chain | FirstOf
