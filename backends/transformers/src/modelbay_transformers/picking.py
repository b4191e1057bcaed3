"""Models in which a token picks the keys that it attends to (an indexer, its picks handed to attention as ``indices``).

Up to as many tokens as may be picked, every key is: there the pick changes nothing, and the model is served as if it
had none. Beyond, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay_transformers.probe_run import Seen

if TYPE_CHECKING:
    from modelbay_transformers.probe import Call

_PICKS = "indices"


def let_see_everything(
    base: nn.Module, calls: Sequence[Call], seen: Seen, longest: int, run: Callable[[int], Any]
) -> None:
    """Replace the modules that pick keys, if a sequence of ``longest`` tokens still has all of them picked.

    Args:
        run: runs the model over so many tokens.

    Raises:
        BackendError: it has not, or it cannot be seen who picks.
    """
    picks = [call.facts[_PICKS] for call in calls if isinstance(call.facts.get(_PICKS), torch.Tensor)]
    makers = {seen.maker(pick) for pick in picks}
    if not makers:
        return
    names = {module: name for name, module in base.named_modules()}
    if None in makers:
        raise BackendError(
            f"{type(base).__name__} lets a token pick the keys it attends to, and no module of it does so."
        )
    for maker in makers:
        assert maker is not None, "a pick without a maker was refused above"
        limit = _limit(maker, longest, run)
        if limit < longest:
            raise BackendError(
                f"{names[maker]} lets each token pick {limit} keys, which is served only while that is all.",
                hint=f"Give max_model_len={limit} or less (it is {longest}).",
            )
    for maker in makers:
        maker.__dict__["forward"] = _every_key


def _limit(maker: nn.Module, longest: int, run: Callable[[int], Any]) -> int:
    """How many keys are picked of ``longest``."""
    made: list[Any] = []
    hook = maker.register_forward_hook(lambda module, args, output: made.append(output.shape[-1]))
    try:
        run(longest)
    finally:
        hook.remove()
    return int(made[0])


def _every_key(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In the place of picks: [1, T, T], one element of memory; attention does not read it."""
    tokens = hidden_states.shape[1]
    return torch.zeros((), dtype=torch.int32, device=hidden_states.device).expand(
        hidden_states.shape[0], tokens, tokens
    )
