"""Linear and experts on CPU through oneDNN, weights reordered once: the calls that Inductor emits for frozen weights.

A plain ``F.linear`` reorders or strides through the weight at every call; with one row that costs a third of the
memory bandwidth, and an expert has few rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modelbay_runtime.kernels import ops
from modelbay_runtime.kernels.experts import grouped


def available() -> str | None:
    if not torch.backends.mkldnn.is_available():
        return "this torch build has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch build has no oneDNN linear"
    return None


def constraint(facts: dict) -> str | None:
    if facts["dtype"] == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions that oneDNN uses"
    return None


def experts_constraint(facts: dict) -> str | None:
    return constraint(facts) or ops.knows_activation(facts)


class Linear:
    """See `modelbay_runtime.kernels.ops.Linear`."""

    repacks = True

    @staticmethod
    def pack(weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


class _Experts:
    """See `modelbay_runtime.kernels.experts.experts`; weights are packed one expert at a time."""

    repacks = True

    @staticmethod
    def pack(weight: torch.Tensor) -> torch.Tensor:
        """[out, in], of one expert."""
        return Linear.pack(weight)

    def __call__(
        self,
        x: torch.Tensor,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
            inner = ops.act_and_mul(Linear.apply(rows, gate_up[number], None, None), activation)
            return Linear.apply(inner, down[number], None, None)

        return grouped(x, ids, weights, len(gate_up), expert)


experts = _Experts()
