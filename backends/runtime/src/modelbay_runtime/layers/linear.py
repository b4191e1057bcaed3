"""Linear layers: plain, split over the ranks that share a layer, and several packed into one product.

Legend: T tokens. Parameter names and logical names are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from modelbay.weights.fp8 import BlockScales
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.block_scales import Cut, ScaledWeight
from modelbay_runtime.layout import Section, Shard
from modelbay_runtime.parallel.sizes import share_of


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
        split = parallel.tp_size > 1
        self.style = style
        self.all_reduce = parallel.all_reduce if style == "rowwise" and split else None
        self.shards: dict[str, Shard] = {}
        if style == "colwise" and split:
            share = share_of(out_features, parallel.tp_rank, parallel.tp_size, "out_features")
            self.shards["weight"] = self.shards["bias"] = Shard(0, share.start, share.size, total=out_features)
            out_features = share.size
        if style == "rowwise" and split:
            share = share_of(in_features, parallel.tp_rank, parallel.tp_size, "in_features")
            self.shards["weight"] = Shard(1, share.start, share.size, total=in_features)
            in_features = share.size
        self.in_features, self.out_features = in_features, out_features
        self.weight = parameter((out_features, in_features), build.dtype)
        self.bias = parameter((out_features,), build.dtype) if bias else None
        # What is added once belongs to the sum, not to each part of it.
        self.adds_here = style != "rowwise" or parallel.tp_rank == 0
        self.kernel = build.op("linear", in_features=in_features, out_features=out_features)
        self.scaled: ScaledWeight | None = None

    def hold_blocks(self, build: BuildContext, blocks: BlockScales) -> None:
        """Hold the weight in 8 bits with the scales of its blocks beside it, and apply them in the product."""
        weight, shard = self.weight, self.shards.get("weight")
        columns = Cut.of(weight.shape[1], shard, 1)
        sections: tuple[Section, ...] = getattr(self, "packed", ())
        shards = [self.shards.get(f"{section.name}.weight") for section in sections] or [shard]
        sizes = [section.size for section in sections] or [weight.shape[0]]
        rows = [Cut.of(size, of_it, 0) for size, of_it in zip(sizes, shards, strict=True)]
        self.scaled = scaled = ScaledWeight(self, "weight", blocks, rows, columns)
        self.scale_parameters = (scaled.scale_name,)
        names = [section.name for section in sections]
        if names:
            self.siblings = {scaled.scale_name: scaled.sections(names, "")}
        prefixes = [f"{name}." for name in names] or [""]
        for prefix, cut, of_it in zip(prefixes, rows, shards, strict=True):
            if (own := scaled.shard(cut, of_it)) is not None:
                self.shards[prefix + scaled.scale_name] = own
        self.kernel = build.op("linear_blocks", in_features=self.in_features, out_features=self.out_features)

    @property
    def repacked(self) -> tuple[str, ...]:
        """See `modelbay_runtime.layout`."""
        return ("weight",) if self.scaled is None and getattr(self.kernel, "repacks", False) else ()

    def post_load(self) -> None:
        """The weight is complete: bring it into the form that the kernel multiplies fastest."""
        if self.scaled is not None:
            self.scaled.post_load(self)
            return
        weight = self.weight.data
        packed = self.kernel.pack(weight)
        if packed is not weight:
            self.weight = nn.Parameter(packed, requires_grad=False)

    def _product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.scaled is not None:
            return self.kernel(x, self.weight, getattr(self, self.scaled.scale_name), self.scaled.block, bias, residual)
        return self.kernel.apply(x, self.weight, bias, residual)

    def partial(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's summand of what `forward` returns; bias and residual are in the first rank's. All of it, unless
        the style is "rowwise"."""
        return self._product(x, self.bias, residual) if self.adds_here else self._product(x)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in], residual: [T, out] or None -> [T, out]."""
        if self.all_reduce is None:  # the only summand
            return self._product(x, self.bias, residual)
        return self.all_reduce(self.partial(x, residual))


class PackedLinear(Linear):
    """Several colwise projections of one input in one product.

    Args:
        parts: logical name -> its output size over all ranks, in the order of the output's columns.
        heads: of those parts that are made of heads, how many: none is cut, and where there are fewer than ranks,
            several ranks hold the same.
    """

    def __init__(
        self,
        build: BuildContext,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        heads: Mapping[str, int] | None = None,
    ) -> None:
        parallel, heads = build.parallel, heads or {}
        shares = {
            name: share_of(size, parallel.tp_rank, parallel.tp_size, name, heads=heads.get(name))
            for name, size in parts.items()
        }
        # The parent sees this rank's rows: the shard of each section is said per section below.
        super().__init__(build, in_features, sum(share.size for share in shares.values()), bias=bias)
        self.style = "packed_colwise"
        sections, start = [], 0
        for name, share in shares.items():
            sections.append(Section(name, start, share.size))
            start += share.size
            if parallel.tp_size > 1:
                shard = Shard(0, share.start, share.size, total=parts[name])
                self.shards[f"{name}.weight"] = self.shards[f"{name}.bias"] = shard
        self.packed = tuple(sections)
