"""The one attention function registered with Transformers: it sends each call to the layer of the module that calls.

The registered name says nothing about an instance; what serves a module hangs on the module itself. So two models in
one process, or two threads, share only this function.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

#: The value of ``config._attn_implementation``. No mask function has this name, so Transformers builds no mask.
ATTENTION = "modelbay"
_LAYER = "_modelbay_attention"


class AttentionCall(Protocol):
    """What hangs on an attention module: serves its calls (a layer) or writes them down (the probe)."""

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
    ) -> torch.Tensor: ...


def register() -> None:
    """Make the name known to Transformers. Idempotent; called when a model is built, never at import."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


def attach(module: Any, serve: AttentionCall | None) -> None:
    """Let ``serve`` answer the attention calls of ``module``; None lets none."""
    module.__dict__[_LAYER] = serve


def _attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any = None, **facts: Any
) -> tuple[torch.Tensor, None]:
    """Transformers' signature: q [1, N, T, D], k [1, K, T, D], v [1, K, T, E] -> ([1, T, N, E], None)."""
    serve = module.__dict__.get(_LAYER)
    if serve is None:
        from modelbay.errors import BackendError

        raise BackendError(
            f"{type(module).__name__} called attention and was not seen by the probe: it is not known how to serve it."
        )
    return serve(module, q, k, v, attention_mask, facts), None
