"""Experts one by one or packed, on disk and in the module: each layout of the one to each of the other (BEHAVIOUR X7).

Legend: E experts, I intermediate size, H hidden size. One by one: ``experts.3.gate_proj.weight`` [I, H], ``up_proj``
[I, H], ``down_proj`` [H, I]. Packed: ``experts.gate_up_proj`` [E, 2I, H] (gate before up) and ``experts.down_proj``
[E, H, I], or gate and up each by itself. A module may have the last two dimensions of its packed weights swapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from modelbay.weights.transforms import Chain, Concat, Rename, Split, Stack, Transform, Transpose, Unstack

#: Names of gate, up and down in checkpoints.
TRIPLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("linear", "linear_v", "linear_1"))
_FUSED = ("gate_up_proj", "w13")
_WEIGHT = r"(?:[._]weight)?$"


@dataclass(frozen=True, slots=True)
class _Layout:
    """A module's experts: the names of their parameters, behind ``experts.`` if packed, else behind the number.

    ``fused``: gate and up are one parameter, which both names are. ``swapped``: [E, H, I] where [E, I, H] is usual.
    """

    packed: bool
    gate: str
    up: str
    down: str
    swapped: bool = False

    @property
    def fused(self) -> bool:
        return self.gate == self.up


def expert_chains(model: nn.Module, prefixes: Sequence[str]) -> tuple[Chain, ...]:
    """Conversions from the layouts that a checkpoint may have to that of every ``experts`` child of ``model``.

    Args:
        prefixes: what a checkpoint's names may lack.
    """
    found: dict[tuple[str, _Layout], None] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        listed = isinstance(module, nn.ModuleList)
        layout = _list_layout(module) if listed else _packed_layout(module, _hidden_size(model))
        if layout is not None:
            found[_path(name, prefixes), layout] = None
    return tuple(chain for path, layout in found for chain in _chains(path, layout))


def _hidden_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    return getattr(config.get_text_config(), "hidden_size", None) if config is not None else None


def _path(name: str, prefixes: Sequence[str]) -> str:
    """A pattern for the paths of these experts in all layers; group ``at`` is what comes before the number."""
    for prefix in ("model.", *prefixes):
        name = name.removeprefix(prefix)
    path = r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
    return rf"(?P<at>(?:^|\.){path})\."


def _list_layout(experts: nn.ModuleList) -> _Layout | None:
    names = {name for expert in experts for name, _ in expert.named_parameters()}
    for triple in TRIPLES:
        if names == {f"{part}.weight" for part in triple}:
            gate, up, down = (f"{part}.weight" for part in triple)
            return _Layout(False, gate, up, down)
    return None


def _packed_layout(experts: nn.Module, hidden_size: int | None) -> _Layout | None:
    if not getattr(experts, "is_concatenated", True):
        return None  # gate and up alternate: their order is not the usual one
    parameters = dict(experts.named_parameters())
    if not parameters or any(parameter.ndim != 3 for parameter in parameters.values()):
        return None
    names = {re.sub(_WEIGHT, "", name): name for name in parameters}
    fused = [(one, one, down) for one in _FUSED for _, _, down in TRIPLES]
    found = next((triple for triple in (*fused, *TRIPLES) if set(names) == set(triple)), None)
    if found is None:
        return None
    gate, up, down = (names[part] for part in found)
    swapped = getattr(experts, "is_transposed", None)
    if swapped is None:
        swapped = _swapped(parameters[gate].shape, parameters[down].shape, gate == up, hidden_size)
    return None if swapped is None else _Layout(True, gate, up, down, swapped)


def _swapped(gate: Sequence[int], down: Sequence[int], fused: bool, hidden_size: int | None) -> bool | None:
    """Whether the last two dimensions are, as far as sizes tell; None if they do not tell."""
    if fused:  # [E, 2I, H] and [E, H, I], or [E, H, 2I] and [E, I, H]: never both
        if gate[1] == 2 * down[2] and gate[2] == down[1]:
            return False
        return True if gate[2] == 2 * down[1] and gate[1] == down[2] else None
    if gate[1] == gate[2] or hidden_size not in gate[1:]:
        return None
    return gate[1] == hidden_size


def _chains(path: str, layout: _Layout) -> Iterator[Chain]:
    for triple in TRIPLES:
        gate, up, down = (rf"{path}(?P<index>\d+)\.{part}\.weight$" for part in triple)
        if layout.packed:
            yield from _pack(gate, up, down, layout)
        elif f"{triple[0]}.weight" != layout.gate:
            yield from _rename(gate, up, down, layout)
    if not layout.swapped:
        yield from _from_packed(path, layout)


def _at(name: str) -> str:
    return rf"\g<at>.{name}"


def _pack(gate: str, up: str, down: str, layout: _Layout) -> Iterator[Chain]:
    """One by one on disk, packed in the module."""

    def turned(name: str) -> tuple[Transform, ...]:
        return (Transpose(rf"\.{re.escape(name)}$", (1, 2)),) if layout.swapped else ()

    yield Chain((down,), (Stack(down, _at(layout.down)), *turned(layout.down)))
    if layout.fused:
        halves = (Stack(gate, _at("#gate")), Stack(up, _at("#up")))
        joined = Concat((r"#gate$", r"#up$"), layout.gate, dim=1)
        yield Chain((gate, up), (*halves, joined, *turned(layout.gate)))
    else:
        for pattern, name in ((gate, layout.gate), (up, layout.up)):
            yield Chain((pattern,), (Stack(pattern, _at(name)), *turned(name)))


def _rename(gate: str, up: str, down: str, layout: _Layout) -> Iterator[Chain]:
    """One by one in both, under other names."""
    for pattern, name in ((gate, layout.gate), (up, layout.up), (down, layout.down)):
        yield Chain((pattern,), (Rename(pattern, rf"\g<at>.\g<index>.{name}"),))


def _from_packed(path: str, layout: _Layout) -> Iterator[Chain]:
    """Packed on disk, and one by one or packed otherwise in the module."""

    def parts(name: str) -> tuple[Transform, ...]:
        if layout.packed:
            return ()
        return (Unstack(rf"\.{re.escape(name)}$", f".{{index}}.{name}"),)

    fused = rf"{path}(?:{'|'.join(_FUSED)}){_WEIGHT}"
    if not layout.fused:
        halves = Split(fused, (_at(layout.gate), _at(layout.up)), "equal", dim=1)
        yield Chain((fused,), (halves, *parts(layout.gate), *parts(layout.up)))
    else:
        yield Chain((fused,), (Rename(fused, _at(layout.gate)),))
    for triple in TRIPLES:
        gate, up, down = (rf"{path}{part}{_WEIGHT}" for part in triple)
        yield Chain((down,), (Rename(down, _at(layout.down)), *parts(layout.down)))
        if layout.fused:
            yield Chain((gate, up), (Concat((gate, up), _at(layout.gate), dim=1),))
        else:
            for pattern, name in ((gate, layout.gate), (up, layout.up)):
                yield Chain((pattern,), (Rename(pattern, _at(name)), *parts(name)))
