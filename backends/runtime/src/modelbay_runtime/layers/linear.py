"""Linear layers: plain, split over the ranks that share a layer, and several packed into one product.

Legend: T tokens. Parameter names and logical names are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layout import Section, Shard


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A parameter that the weight loader fills: on meta until then."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """``y = x W^T + b (+ residual)``, [T, in] -> [T, out].

    Args:
        style: "replicated"; "colwise" gives each rank a part of the outputs; "rowwise" a part of the inputs, and the
            sum over ranks is taken in `forward`.
    """

    def __init__(
        self, build: BuildContext, in_features: int, out_features: int, *, bias: bool = False, style: str = "replicated"
    ) -> None:
        super().__init__()
        parallel = build.parallel
        self.style = style
        self.all_reduce = parallel.all_reduce if style == "rowwise" and parallel.tp_size > 1 else None
        self.shards: dict[str, Shard] = {}
        if style == "colwise" and parallel.tp_size > 1:
            out_features = parallel.divide(out_features, "out_features")
            self.shards["weight"] = self.shards["bias"] = Shard(0, parallel.tp_rank * out_features, out_features)
        if style == "rowwise" and parallel.tp_size > 1:
            in_features = parallel.divide(in_features, "in_features")
            self.shards["weight"] = Shard(1, parallel.tp_rank * in_features, in_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = parameter((out_features, in_features), build.dtype)
        self.bias = parameter((out_features,), build.dtype) if bias else None
        # A rowwise bias belongs to the sum, not to each part of it.
        self.adds_here = style != "rowwise" or parallel.tp_rank == 0
        self.kernel = build.op("linear", in_features=in_features, out_features=out_features)

    def post_load(self) -> None:
        """The weight is complete: bring it into the form that the kernel multiplies fastest."""
        self.weight = nn.Parameter(self.kernel.pack(self.weight.data), requires_grad=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in], residual: [T, out] or None -> [T, out]."""
        if self.all_reduce is None:
            return self.kernel.apply(x, self.weight, self.bias, residual)
        bias = self.bias if self.adds_here else None
        return self.all_reduce(self.kernel.apply(x, self.weight, bias, residual if self.adds_here else None))


class PackedLinear(Linear):
    """Several colwise projections of one input in one product.

    Args:
        parts: logical name -> its output size over all ranks, in the order of the output's columns.
    """

    def __init__(self, build: BuildContext, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        tp_size, tp_rank = build.parallel.tp_size, build.parallel.tp_rank
        local = {name: build.parallel.divide(size, name) for name, size in parts.items()}
        # The parent sees this rank's rows: the shard of each section is said per section below.
        super().__init__(build, in_features, sum(local.values()), bias=bias)
        sections, start = [], 0
        for name, size in local.items():
            sections.append(Section(name, start, size))
            if tp_size > 1:
                self.shards[f"{name}.weight"] = self.shards[f"{name}.bias"] = Shard(0, tp_rank * size, size)
            start += size
        self.packed = tuple(sections)
