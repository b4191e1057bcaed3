"""Meta is contagious: how a forward runs when parameters have no values and everything small does.

Where a model's code asks for the values of hidden states, it runs with parameters that all are one small number (views
of one element, so that nothing large is allocated); hidden states are then real, and followed by a mark.

Follows, on the way, what decides whether tokens of several sequences may share a batch: where positions come from, and
whether tokens are mixed anywhere but in attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from modelbay.errors import BackendError
from modelbay_transformers import masks
from modelbay_transformers.positions import Place, calling_place

_aten = torch.ops.aten
_SMALL_TABLE = 1 << 20
_MARK, _PLACE = "_modelbay_from", "_modelbay_place"
#: Operations after which a mask is still the same mask, as long as it is whole.
_VIEWS = {
    _aten.slice, _aten.expand, _aten.alias, _aten.detach, _aten.clone, _aten._to_copy, _aten.view, _aten.unsqueeze,
    _aten.squeeze,
}  # fmt: skip
#: Operations that use a number to pick an element rather than to compute with it.
_PICKING = {_aten.index, _aten.index_put, _aten.index_put_, _aten.gather, _aten.scatter, _aten.index_select}
_GIVEN, _OWN, _HIDDEN, _LONGEST = "given positions", "own numbering", "hidden states", "longest position"
_READING = {_aten._local_scalar_dense, _aten.is_nonzero, _aten.where}
_FACTORIES = {_aten.arange, _aten.ones, _aten.zeros, _aten.full, _aten.scalar_tensor}
_PRODUCTS = {_aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2)}
_RUNNING = {_aten.cumsum, _aten.cumprod, _aten.logcumsumexp, _aten.roll, _aten.cummax}


def mark_given(positions: torch.Tensor) -> torch.Tensor:
    """Positions that come from outside."""
    setattr(positions, _MARK, frozenset((_GIVEN,)))
    return positions


def mark_hidden(parameter: torch.Tensor) -> torch.Tensor:
    """What is computed with it is a hidden state."""
    setattr(parameter, _MARK, frozenset((_HIDDEN,)))
    return parameter


def _is_hidden(item: torch.Tensor) -> bool:
    return item.device.type == "meta" or _HIDDEN in getattr(item, _MARK, ())


class OwnNumbering(Exception):
    """The model numbers its tokens at ``place``, where positions could be given to it instead."""

    def __init__(self, place: Place) -> None:
        self.place = place


class MetaSpreads(TorchDispatchMode):
    """An operation with one operand on meta runs on meta as a whole; one with real operands runs for real.

    Attributes:
        positions_used: whether given positions ever met hidden states.
        position_rows: rows of the smallest table that is indexed by position.
        longest_read_by: who looked at the longest position of the batch.
        trace: operations and the plain numbers that they were given.

    Args:
        positions, places: what is given in place of ``torch.arange``, and where in the model's code.
        guard: whether ``tokens`` is a size that no dimension of the model has, so that shapes tell what is mixed.

    Raises (where it sees it):
        OwnNumbering: the model numbers its tokens itself.
        BackendError: it does so in order to pick tokens, or mixes tokens outside of attention.
    """

    def __init__(
        self, tokens: int, where: Callable[[], str], positions: torch.Tensor, places: set[Place], *, guard: bool
    ) -> None:
        super().__init__()
        self.guard = guard
        self.tokens, self.where, self.positions, self.places = tokens, where, positions, places
        self.positions_used = False
        self.longest_read_by: str | None = None
        self.trace: list[tuple[Any, tuple[Any, ...]]] = []
        self.position_rows: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        operands = [item for item in flat if isinstance(item, torch.Tensor)]
        marks = frozenset[str]().union(*(getattr(item, _MARK, ()) for item in operands))
        self.trace.append((func, tuple(item for item in flat if isinstance(item, (int, float, bool, str)))))
        if _LONGEST in marks and func.overloadpacket in _READING:
            self.longest_read_by = self.longest_read_by or self.where()
        if any(_is_hidden(item) for item in operands):
            self._meet(func, args, operands, marks)
        if any(item.device.type == "meta" for item in operands):
            args, kwargs = tree_map_only(torch.Tensor, _to_meta, (_without_bool_index(func, args), kwargs))
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("meta")}
        elif func.overloadpacket in _FACTORIES and _is_small(args, kwargs):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        output = func(*args, **kwargs)
        if func.overloadpacket in (_aten.max, _aten.amax) and _GIVEN in marks:
            marks |= {_LONGEST}
        self._mark(operands, output, marks)
        if func.overloadpacket in _VIEWS and operands and output.shape[-2:] == operands[0].shape[-2:]:
            masks.remember(output, masks.origin(operands[0]))
        return self._number(output) if func.overloadpacket is _aten.arange else output

    def _number(self, output: torch.Tensor) -> torch.Tensor:
        """What ``torch.arange`` gave; where it numbers tokens it is marked, or is replaced by positions."""
        if output.numel() != self.tokens:
            return output
        place = calling_place()
        if place in self.places:
            return mark_given(self.positions.flatten().to(output.dtype, copy=True))
        setattr(output, _MARK, frozenset((_OWN,)))
        setattr(output, _PLACE, place)
        return output

    def _meet(self, func: Any, args: Any, operands: list[torch.Tensor], marks: frozenset[str]) -> None:
        """Real operands and those on meta meet in one operation."""
        if not self.guard:
            return
        if _GIVEN in marks:
            self.positions_used = True
            if func is _aten.embedding.default:
                rows = args[0].shape[0]
                self.position_rows = min(rows, self.position_rows or rows)
        elif _OWN in marks and any(_is_hidden(item) and item.is_floating_point() for item in operands):
            place = next((p for item in operands if (p := getattr(item, _PLACE, None))), None)
            if place is not None and func.overloadpacket not in _PICKING:
                raise OwnNumbering(place)
            raise BackendError(
                f"{self.where()} numbers its tokens itself (torch.arange): "
                "tokens of several sequences cannot share a batch."
            )
        how = self._mixes(func, args)
        if how:
            raise BackendError(
                f"{self.where()} mixes tokens outside of attention ({how}), which is not served.",
                hint="Attention itself must be called through ALL_ATTENTION_FUNCTIONS.get_interface(…).",
            )

    def _mixes(self, func: Any, args: Any) -> str | None:
        """How an operation lets one token see another's hidden state; None if it does not (as far as shapes tell)."""
        packet, tokens = func.overloadpacket, self.tokens
        if packet in _PRODUCTS:
            left, right = (args[i] for i in _PRODUCTS[packet])
            if left.shape[-1] == tokens and left.shape[-2] == tokens and right.shape[-2] == tokens:
                return "a product over tokens"
        elif packet is _aten.convolution:
            if any(n >= tokens and k > 1 for n, k in zip(args[0].shape[2:], args[1].shape[2:], strict=True)):
                return "a convolution"
        elif packet in _RUNNING and isinstance(args[-1], (int, list)) and tokens in args[0].shape[:-1]:
            dims = args[-1] if isinstance(args[-1], list) else [args[-1]]
            if any(args[0].shape[dim] == tokens for dim in dims):
                return func.overloadpacket.__name__
        elif packet is _aten.constant_pad_nd and args[0].is_floating_point():
            padding = args[1]
            for i in range(0, len(padding), 2):
                before, added = args[0].shape[-1 - i // 2], padding[i] + padding[i + 1]
                if (padding[i] or padding[i + 1]) and tokens in (before, before + added):
                    return "a shift or padding of tokens"
        elif packet is _aten.cat and args[0][0].is_floating_point() and len(args[0]) > 1:
            dim = args[1] if len(args) > 1 else 0
            if sum(part.shape[dim] for part in args[0] if part.ndim > 1) == tokens:
                return "a shift of tokens"
        return None

    def _mark(self, operands: list[torch.Tensor], output: Any, marks: frozenset[str]) -> None:
        place = next((p for item in operands if (p := getattr(item, _PLACE, None))), None)
        for item in tree_flatten(output)[0]:
            if not isinstance(item, torch.Tensor):
                continue
            if marks and item.device.type != "meta":
                own = marks if self.tokens in item.shape else marks - {_OWN}
                if _HIDDEN in own:
                    own = frozenset((_HIDDEN,))
                setattr(item, _MARK, own)
                if _OWN in own:
                    setattr(item, _PLACE, place)


def _without_bool_index(func: Any, args: Any) -> Any:
    """How many elements a real mask picks is known here, and would not be on meta."""
    if func.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_):
        return args
    indices: list[Any] = []
    for index in args[1]:
        real_mask = index is not None and index.dtype == torch.bool and index.device.type != "meta"
        indices += index.nonzero(as_tuple=True) if real_mask else [index]
    return (args[0], indices, *args[2:])


def _is_small(args: Any, kwargs: Any) -> bool:
    """A vector at most, or a table of whole numbers: not what hidden states are gathered in."""
    shape = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else ()
    dtype = kwargs.get("dtype")
    whole = (dtype is not None and not dtype.is_floating_point) or (len(args) > 1 and type(args[1]) in (int, bool))
    return len(shape) <= 1 or (whole and math.prod(shape) <= _SMALL_TABLE)


def _to_meta(item: torch.Tensor) -> torch.Tensor:
    return item if item.device.type == "meta" else item.to("meta")
