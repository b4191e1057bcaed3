"""Which keys a model's masks let its attention see, read off Transformers' own mask functions during the probe.

While a model is probed, it asks for attention under a name for which Transformers builds masks: ours describes the mask
function instead of filling a matrix, and what it gives is recognised where attention receives it. While a model is
served, no mask is built; the kernels apply what was read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from modelbay.errors import BackendError

_FACTS = "_modelbay_mask"
#: The origin of a mask that stands for none.
PLACEHOLDER = "placeholder"


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """``window``: keys that a query sees, itself included; of an encoder, distances below it on both sides."""

    causal: bool
    window: int | None


def describe_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, *args: Any, device: Any = None, **kwargs: Any
) -> torch.Tensor:
    """Transformers' signature of a mask builder: a mask on meta that carries what it lets see."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    return remember(mask, mask_function)


def placeholder_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, device: Any = None, **kwargs: Any
) -> torch.Tensor:
    """A mask of one element, expanded: for models that look at their mask before attention, which ignores it."""
    mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    return remember(mask, PLACEHOLDER)


def remember(mask: torch.Tensor, value: Any) -> torch.Tensor:
    """Hang a mask's origin on it."""
    setattr(mask, _FACTS, value)
    return mask


def origin(mask: Any) -> Any:
    """What `remember` hung on a mask; None for one that the model made itself."""
    return getattr(mask, _FACTS, None)


def read_mask(mask_function: Any, length: int, who: str) -> MaskFacts:
    """What a mask function lets see in a sequence of ``length`` tokens.

    Raises:
        IndexError: the function looks at the tokens themselves, and was made for fewer.
        BackendError: neither causal nor both ways, with or without a window.
    """
    facts, broken = _read(mask_function, length)
    if broken is None:
        return facts
    low, high = 1, length  # chunks, for one, do not show in a sequence that fits into the first
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _read(mask_function, middle)[1] is None else (low, middle)
    raise BackendError(
        f"{who} hides keys by a rule of its own, neither causal nor both ways with a window (token {broken[0]} sees "
        f"{broken[1]} of {length}), so it is not served.",
        hint=f"In {low} tokens it does not show: give max_model_len={low} or less." if low > 1 else None,
    )


def _read(mask_function: Any, length: int) -> tuple[MaskFacts, tuple[int, int] | None]:
    """The facts that fit best, and a row that they do not fit, with how many keys it sees."""
    keys = torch.arange(length)
    zero = torch.zeros((), dtype=torch.long)
    rows = {row: _row(mask_function, zero, row, keys) for row in _rows(length)}
    causal = not any(bool(seen[row + 1 :].any()) for row, seen in rows.items())
    facts = MaskFacts(causal, _window(rows))
    for row, seen in rows.items():
        distance = row - keys
        expected = distance >= 0 if causal else torch.ones_like(seen)
        if facts.window is not None:
            expected &= distance.abs() < facts.window
        if not torch.equal(expected, seen):
            return facts, (row, int(seen.sum()))
    return facts, None


def _rows(length: int) -> list[int]:
    return sorted({row for row in (0, 1, length // 3, length // 2 + 1, length - 2, length - 1) if 0 <= row < length})


def _row(mask_function: Any, zero: torch.Tensor, row: int, keys: torch.Tensor) -> torch.Tensor:
    seen = mask_function(zero, zero, torch.tensor(row), keys)
    if seen.device.type == "meta":
        raise BackendError("what its masks hide depends on hidden states.")
    return torch.as_tensor(seen, dtype=torch.bool).expand(keys.shape).clone()


def _window(rows: dict[int, torch.Tensor]) -> int | None:
    """The window that the last row shows, None if it sees everything behind it."""
    row = max(rows)
    behind = int(rows[row][: row + 1].sum())
    return None if behind == row + 1 else behind
