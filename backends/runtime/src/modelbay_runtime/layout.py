"""How a rank's parameters lie with respect to the tensors of a checkpoint: sections of packed ones, and slices.

A module says so with attributes that the loader reads:

* ``packed: tuple[Section, ...]``: its ``weight`` and ``bias`` hold these siblings, by the names a checkpoint gives them
  (``qkv_proj`` holds ``q_proj``, ``k_proj``, ``v_proj``).
* ``siblings: dict[str, tuple[Section, ...]]``: the same for a parameter, by its name, whose sections have other sizes.
* ``parts: dict[str, tuple[Section, ...]]``: the same for any other parameter, by its name: the names that a checkpoint
  gives to what it holds, beside it (``experts.gate_up_proj`` holds ``experts.gate_proj``, ``experts.up_proj``).
* ``shards: dict[str, Shard]``: by parameter (``"weight"``), section (``"q_proj.weight"``) or part (``"gate_proj"``),
  the slice that this rank holds; absent means whole.
* ``held_elsewhere: str``: nothing of it is on this rank; tensors under its name are ignored, by the rule of this name.
  ``weight_tied_to: str | None`` is then as ``tied_to``: its ``weight`` is a parameter that is on this rank.
* ``tied_to: str | None``: its ``weight`` is this parameter of the model, if the config ties word embeddings.
* ``scale_parameters: tuple[str, ...]``: parameters that are scales of others: they take memory and are not counted.
* ``post_load()``: called once when everything in it is loaded, to repack its weights.
* ``repacked: tuple[str, ...]``: parameters in whose place ``post_load`` puts a copy, or nothing: what they are read
  into serves the next layer, or is the mapped file itself.

The outermost module may say how checkpoints of it are laid out:

* ``checkpoint_transforms: tuple[Transform, ...]``: from a checkpoint's names and shapes to its own. They take the place
  of those of the `ArchSpec`, which are written for the class that it names. A tensor whose name the module has already
  and would lose by them is left alone, so that they may serve several layouts.
* ``checkpoint_prefixes: tuple[str, ...]``: what names in a checkpoint may begin with though the module's do not, and
  the other way round, besides ``"model."``.
* ``checkpoint_optional: tuple[str, ...]``: regular expressions; a persistent buffer whose name one of them is found in
  keeps what it was built with if a checkpoint lacks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


def said(module: nn.Module, name: str, default: Any = None) -> Any:
    """What a module says of itself under one of the names above, or ``default``.

    ``getattr`` gives the same, at five times the cost where it says nothing: `nn.Module` then searches its tables and
    words an error. The loader asks thousands of times.
    """
    own = vars(module)
    if name in own:
        return own[name]
    return getattr(module, name) if hasattr(type(module), name) else default


@dataclass(frozen=True, slots=True)
class Section:
    """``size`` entries from ``start`` along ``dim`` of the local parameter are the logical sibling ``name``."""

    name: str
    start: int
    size: int
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """Entries ``start`` to ``start + size`` along ``dim`` of the logical tensor on disk, then ``pad`` zeros.

    ``total``: the logical tensor's size along ``dim`` on disk, checked where it is known. Several ranks may hold the
    same entries. A parameter that is one tensor on disk though it holds several is cut if all its totals are known.
    """

    dim: int
    start: int
    size: int
    pad: int = 0
    total: int | None = None
