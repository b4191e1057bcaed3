"""A runtime attention layer behind Transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch

from modelbay.errors import EngineError
from modelbay_runtime.api import BuildContext, KVSpec, Step
from modelbay_runtime.layers.attention import Attention
from modelbay_transformers.masks import PLACEHOLDER, origin
from modelbay_transformers.probe import AttentionFacts


class StepHolder:
    """The instance's step, swapped at each forward: Transformers' code stands between the runner and attention."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: Step | None = None


class ServedAttention:
    """Serves the calls of one attention module. See `modelbay_transformers.dispatch.AttentionCall`."""

    def __init__(self, build: BuildContext, facts: AttentionFacts, holder: StepHolder) -> None:
        self.facts = facts
        self.holder = holder
        self.layer = Attention(
            build, facts.layer, facts.num_heads, facts.num_kv_heads, facts.head_size,
            v_head_size=facts.v_head_size, scale=facts.scaling, window=facts.window, softcap=facts.softcap,
            causal=facts.causal, has_sinks=facts.sinks,
        )  # fmt: skip

    @property
    def kv_spec(self) -> KVSpec:
        return self.layer.kv_spec

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
    ) -> torch.Tensor:
        """q: [1, N, T, D], k: [1, K, T, D], v: [1, K, T, E] -> [1, T, N, E]."""
        if (mask is not None and origin(mask) != PLACEHOLDER) or facts.get("scaling", self.facts.scaling) not in (
            None,
            self.facts.scaling,
        ):
            raise EngineError(f"{self.facts.name} calls attention otherwise than when it was probed.")
        step = self.holder.current
        assert step is not None, "the model's forward sets the step before any layer runs"
        rows = torch.cat((k[0].transpose(0, 1).flatten(1), v[0].transpose(0, 1).flatten(1)), 1)
        out = self.layer(q[0].transpose(0, 1), rows, step, facts.get("s_aux"))
        return out.view(1, -1, self.facts.num_heads, self.facts.v_head_size)
