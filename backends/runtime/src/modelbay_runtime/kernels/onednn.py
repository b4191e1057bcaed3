"""Linear on CPU through oneDNN with the weight reordered once: the calls that Inductor emits for frozen weights.

A plain ``F.linear`` reorders or strides through the weight at every call; with one row that costs a third of the
memory bandwidth.
"""

from __future__ import annotations

import torch


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


class Linear:
    """See `modelbay_runtime.kernels.ops.Linear`."""

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
