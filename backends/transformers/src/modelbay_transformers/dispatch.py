"""The one attention function registered with Transformers: it sends each call to the layer of the module that calls.

The registered name says nothing about an instance; what serves a module hangs on the module itself. So two models in
one process, or two threads, share only this function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from modelbay_transformers.masks import describe_mask, placeholder_mask
from modelbay_transformers.probe_run import SMALL

#: The value of ``config._attn_implementation``. No mask function has this name, so Transformers builds no mask.
ATTENTION = "modelbay"
#: Its value while a model is probed: there is a mask function of this name, which describes instead of building.
PROBING = "modelbay_probing"
#: The value for models that cannot do without a mask to look at: they get one that attention ignores.
WITH_MASK = "modelbay_with_mask"
_LAYER = "_modelbay_attention"


class AttentionCall(Protocol):
    """What hangs on an attention module: serves its calls (a layer) or writes them down (the probe)."""

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
    ) -> torch.Tensor: ...


def register() -> None:
    """Make the names known to Transformers. Idempotent; called when a model is built, never at import."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    ALL_ATTENTION_FUNCTIONS.register(PROBING, _attend)
    ALL_ATTENTION_FUNCTIONS.register(WITH_MASK, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBING, describe_mask)
    ALL_MASK_ATTENTION_FUNCTIONS.register(WITH_MASK, placeholder_mask)


def attach(module: Any, serve: AttentionCall | None) -> None:
    """Let ``serve`` answer the attention calls of ``module``; None lets none."""
    module.__dict__[_LAYER] = serve


def attached(module: Any) -> AttentionCall | None:
    """What answers the attention calls of ``module``."""
    return module.__dict__.get(_LAYER)


@contextmanager
def attending(base: nn.Module, serve: AttentionCall) -> Iterator[None]:
    """While it lasts, ``serve`` answers every attention call in ``base``."""
    before = [(module, attached(module)) for module in base.modules()]
    try:
        for module, _ in before:
            attach(module, serve)
        yield
    finally:
        for module, old in before:
            attach(module, old)


def blank(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
) -> torch.Tensor:
    """Attention in shape alone: small numbers."""
    return v.new_full((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), SMALL)


def _attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any = None, **facts: Any
) -> tuple[torch.Tensor, None]:
    """Transformers' signature: q [1, N, T, D], k [1, K, T, D], v [1, K, T, E] -> ([1, T, N, E], None)."""
    serve = attached(module)
    if serve is None:
        from modelbay.errors import BackendError

        raise BackendError(
            f"{type(module).__name__} called attention and was not seen by the probe: it is not known how to serve it."
        )
    return serve(module, q, k, v, attention_mask, facts), None
