"""Modules that hold a rank's part of what a Transformers model has whole: linears, embeddings, single parameters.

Legend: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.embedding import Embedding, vocabulary_shard
from modelbay_runtime.layers.linear import Linear, parameter
from modelbay_runtime.layout import Section, Shard
from modelbay_transformers import dispatch
from modelbay_transformers.division import COLWISE, GATHER, ROWWISE, SPLIT_INPUT
from modelbay_transformers.probe_run import NeedsValues, run_on_meta
from modelbay_transformers.surgery import held_besides, module_name, token_table


class SlicedLinear(Linear):
    """One rank's part of a linear, in any of the four styles that Transformers' plans have for one.

    Args:
        parts: of a colwise one, how many different parts there are, where fewer than ranks.
        sections: of a colwise one, the sizes of what its output holds one after another, each of which is split.
        name: its own name in its parent: what sections are called after.
    """

    def __init__(
        self,
        build: BuildContext,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        style: str,
        name: str,
        parts: int | None = None,
        sections: Sequence[int] = (),
    ) -> None:
        group = build.parallel.tp
        parts = parts or group.size
        by_output = style in (COLWISE, GATHER)
        local_in = in_features if by_output else in_features // group.size
        local_out = out_features // parts if by_output else out_features
        super().__init__(build, local_in, local_out, bias=bias)
        self.style, self.group = style, group
        self.adds_here = by_output or group.rank == 0
        self.start = group.rank * local_in
        part = group.rank * parts // group.size
        if by_output and sections:
            self._cut_sections(name, part, parts, sections)
        elif by_output:
            self.shards["weight"] = self.shards["bias"] = Shard(0, part * local_out, local_out, total=out_features)
        else:
            self.shards["weight"] = Shard(1, self.start, local_in, total=in_features)

    def _cut_sections(self, name: str, part: int, parts: int, sizes: Sequence[int]) -> None:
        sections, start = [], 0
        for index, size in enumerate(sizes):
            local = size // parts
            sections.append(Section(f"{name}#{index}", start, local))
            shard = Shard(0, part * local, local, total=size)
            self.shards[f"{name}#{index}.weight"] = self.shards[f"{name}#{index}.bias"] = shard
            start += local
        self.packed = tuple(sections)
        self.hold_blocks = None  # type: ignore[assignment]  # a block on disk may lie in two sections

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., in], of which a rowwise linear is given its part -> [..., out], or its part of a colwise one's."""
        if self.style == SPLIT_INPUT:
            x = x.narrow(-1, self.start, self.in_features).contiguous()
        y = self.partial(x, residual)
        if self.style == GATHER:
            return self.group.all_gather(y, -1)
        return self.group.all_reduce(y) if self.style in (ROWWISE, SPLIT_INPUT) else y


class AnyEmbedding(Embedding):
    """The runtime's embedding, split by tokens, for ids with any leading dimensions."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids.flatten()).unflatten(0, input_ids.shape)


def looked_up_table(build: BuildContext, outer: Any, base: Any) -> nn.Embedding | None:
    """The table of tokens, if it is to be split: it is on this stage, and the model's code only looks tokens up in it.
    Before anything is replaced."""
    table = token_table(outer, base)
    if build.parallel.tp.size == 1 or not isinstance(table, nn.Embedding):
        return None
    weight = table._parameters.get("weight")  # of a table that another stage has, an attribute is left
    if weight is None:
        return None
    if held_besides(outer, weight, table, outer.get_output_embeddings()):
        return None
    return table if weight.dtype == build.dtype and _only_looked_up(base, table) else None


def split_embedding(build: BuildContext, outer: nn.Module, table: nn.Embedding | None) -> None:
    """Split ``table``, unless a head that could not be replaced is the same parameter."""
    name = module_name(outer, table)
    if table is None or name is None:
        return
    if not held_besides(outer, table.weight, table):
        _split_vocabulary(build, outer, name)


class _Uses(TorchDispatchMode):
    """Whether a parameter is used while its module is not running."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.inside, self.outside = weight, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and any(item is self.weight for item in tree_flatten((args, kwargs))[0]):
            self.outside = True
        return func(*args, **(kwargs or {}))


def _only_looked_up(base: nn.Module, embedding: nn.Embedding) -> bool:
    """Whether the model's code leaves the table to its module, which the runtime's can stand for."""
    uses = _Uses(embedding.weight)

    def step(by: int) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            uses.inside += by

        return hook

    hooks = [embedding.register_forward_pre_hook(step(1)), embedding.register_forward_hook(step(-1))]
    try:
        with dispatch.attending(base, dispatch.blank), uses:
            run_on_meta(base)
    except NeedsValues:
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return not uses.outside


def _split_vocabulary(build: BuildContext, model: nn.Module, name: str) -> None:
    """Let the embedding ``name`` hold this rank's tokens.

    One whose class does more than look up (a scale) keeps its code: what it gives for the tokens of other ranks is
    zeroed, and the sum over ranks is taken.
    """
    old: Any = model.get_submodule(name)
    if type(old) is nn.Embedding:
        new = AnyEmbedding(build, old.num_embeddings, old.embedding_dim)
        if "forward" in old.__dict__:  # a stage that holds it for its head alone
            new.__dict__["forward"] = old.__dict__["forward"]
        model.set_submodule(name, new)
        return
    group, shard = build.parallel.tp, vocabulary_shard(build, old.num_embeddings)
    old._parameters["weight"] = parameter((shard.size + shard.pad, old.embedding_dim), build.dtype)
    old.shards = {"weight": shard}
    old.padding_idx = None  # of training alone, and no row of this rank
    if "forward" in old.__dict__:
        return  # here too: it looks nothing up
    look_up = old.forward

    def forward(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = input_ids - shard.start
        elsewhere = (rows < 0) | (rows >= shard.size)
        found = look_up(rows.masked_fill(elsewhere, 0), *args, **kwargs)
        return group.all_reduce(found.masked_fill(elsewhere[..., None], 0))

    old.__dict__["forward"] = forward


def split_parameter(build: BuildContext, model: nn.Module, name: str, dim: int) -> None:
    """Let the parameter ``name`` hold this rank's entries along ``dim``."""
    path, _, key = name.rpartition(".")
    module: Any = model.get_submodule(path)
    old = module._parameters[key]
    size, rank = old.shape[dim] // build.parallel.tp.size, build.parallel.tp.rank
    shape = (*old.shape[:dim], size, *old.shape[dim + 1 :])
    module._parameters[key] = parameter(shape, old.dtype)
    module.shards = {**getattr(module, "shards", {}), key: Shard(dim, rank * size, size, total=old.shape[dim])}
