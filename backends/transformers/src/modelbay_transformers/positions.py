"""Positions for models that number their tokens themselves, as if a batch were one sequence.

Decoders of the BART kind take no positions, and pass ``position_ids`` to one of their children: there ours take the
place of theirs. Others call ``torch.arange`` in the middle of a layer: the probe sees on which line, and on that line
they get our positions. That no other part of the model numbers tokens is for the probe to see. A few number only what
is no padding.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelbay.errors import EngineError

_GIVER = "_modelbay_positions"
_ARRIVES = "_modelbay_takes_positions"
_PLACES = "_modelbay_numbering"
#: What Transformers calls the rule that numbers tokens which are no padding.
_RULE = "create_position_ids_from_input_ids"
#: A line of code: file and number.
Place = tuple[str, int]
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def give_positions(base: nn.Module, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions [1, T] for the next forward: to the `PositionGiver`, if there is one, and as the argument that carries
    them, if forward takes it (or hands on what it does not know)."""
    giver = PositionGiver.find(base)
    if giver is not None:
        giver.positions = positions
    return {"position_ids": positions} if _argument_arrives(base) else {}


def _argument_arrives(base: nn.Module) -> bool:
    """Whether forward takes ``position_ids``, or hands on what it does not know; asked at every step, so remembered."""
    if _ARRIVES not in base.__dict__:
        names = inspect.signature(base.forward).parameters
        base.__dict__[_ARRIVES] = "position_ids" in names or "kwargs" in names
    return bool(base.__dict__[_ARRIVES])


def takes_positions(base: nn.Module) -> bool:
    """Whether forward says that it takes ``position_ids``."""
    return "position_ids" in inspect.signature(base.forward).parameters


class PositionGiver:
    """Hooks on the children of one model that take ``position_ids``. ``positions``: [1, T], set before each forward."""

    def __init__(self, base: nn.Module) -> None:
        self.positions: torch.Tensor | None = None
        for module in base.modules():
            if module is not base and "position_ids" in inspect.signature(module.forward).parameters:
                module.register_forward_pre_hook(self._replace, with_kwargs=True)
        base.__dict__[_GIVER] = self

    @staticmethod
    def find(base: nn.Module) -> PositionGiver | None:
        return base.__dict__.get(_GIVER)

    def _replace(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        theirs = kwargs.get("position_ids")
        if not isinstance(theirs, torch.Tensor) or self.positions is None:
            return None
        return args, {**kwargs, "position_ids": self.positions.view_as(theirs)}


def numbering_places(base: nn.Module) -> set[Place]:
    """The lines of its code on which this model numbers its tokens; filled by the probe."""
    places: set[Place] = base.__dict__.setdefault(_PLACES, set())
    return places


def numbered(base: nn.Module, positions: torch.Tensor) -> AbstractContextManager[Any]:
    """While it lasts, ``positions`` [1, T] stand for ``torch.arange(T)`` where the model numbers its tokens."""
    places = numbering_places(base)
    return _Numbering(places, positions[0]) if places else nullcontext()


def calling_place() -> Place:
    """The line of the model's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class _Numbering(TorchFunctionMode):
    def __init__(self, places: set[Place], positions: torch.Tensor) -> None:
        super().__init__()
        self.places, self.positions = places, positions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.arange or calling_place() not in self.places:
            return output
        if output.shape != self.positions.shape:
            raise EngineError(f"the model numbers {len(output)} tokens, and the step has {len(self.positions)}.")
        return self.positions.to(output.dtype)


@dataclass(frozen=True, slots=True)
class PaddedNumbering:
    """RoBERTa and its descendants number the tokens that are no padding, from the padding index on, and give padding
    that index itself.

    Args:
        whole: every step has its sequences from their first token on. Where that is not so, ids with padding among them
            cannot be numbered.
    """

    padding_idx: int
    whole: bool

    def __call__(self, positions: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        """[T] positions of all tokens and their [T] ids -> [T] positions as the model numbers them."""
        if input_ids is None:
            return positions + self.padding_idx + 1
        padding = input_ids == self.padding_idx
        if self.whole:
            counted = padding.cumsum(0)
            start = (torch.arange(len(positions), device=positions.device) - positions).clamp_min(0)
            positions = positions - (counted - (counted - padding.long())[start])
        return (positions + self.padding_idx + 1).masked_fill(padding, self.padding_idx)


def padded_numbering(base: nn.Module, *, whole: bool) -> PaddedNumbering | None:
    """How ``base`` numbers its tokens, if it is so."""
    module = _numbers_from_padding(base)
    return PaddedNumbering(int(module.padding_idx), whole) if module is not None else None


def position_room(base: nn.Module) -> int | None:
    """How many tokens such a model has positions for: its table begins with rows that no token gets."""
    module = _numbers_from_padding(base)
    table = getattr(module, "position_embeddings", None)
    return table.num_embeddings - int(module.padding_idx) - 1 if isinstance(table, nn.Embedding) else None


def _numbers_from_padding(base: nn.Module) -> Any:
    """The module that makes positions of ids, by a method or, where it has a table of them, by a function beside it."""
    for module in base.modules():
        if getattr(module, "padding_idx", None) is None:
            continue
        has_table = isinstance(getattr(module, "position_embeddings", None), nn.Embedding)
        if hasattr(module, _RULE) or (has_table and hasattr(inspect.getmodule(type(module)), _RULE)):
            return module
    return None
