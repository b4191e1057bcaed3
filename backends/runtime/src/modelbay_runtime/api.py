"""What a family is written against: the model contract, version 1.

A native model is an ``nn.Module`` with

* ``__init__(config: ModelConfig, build: BuildContext)``
* ``forward(input_ids | None, positions, step, inputs_embeds=None) -> hidden`` over flat tokens: [T] -> [T, H]
* ``logits(hidden) -> [R, V]`` for the rows that the engine picked
* ``kv_specs() -> {layer index: KVSpec}``
* where `BuildContext.draft_tokens` asks for it and the model has a draft layer, ``can_draft = True`` and
  ``draft(hidden, input_ids, positions, step) -> hidden``: from what the model made of each position and the token that
  follows it, what predicts the one after that, [R, H] -> [R, H]; ``draft_logits(hidden) -> [R, V]``
* ``max_positions: int`` (optional): how many tokens it has positions for, where that is fewer than the config says
* ``refused_tokens: Mapping[int, str]`` (optional): token ids that no prompt may have, each with the reason

Legend: T tokens, H hidden size, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from modelbay.specs import CONTRACT_VERSION
from modelbay_runtime.kv_spec import FullKV, KVSpec, LatentKV, NoKV, SlidingKV, StateKV
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.step import KVGroupStep, Step

if TYPE_CHECKING:
    from modelbay.config import ModelConfig
    from modelbay_runtime.kernels.table import KernelTable


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a module may know while it is built.

    Attributes:
        config: the model's facts.
        dtype: of parameters and activations.
        device: where parameters will live once loaded; while the module is built they are on meta.
        kernels: the op table; `op` asks it.
        parallel: this process's place.
        max_model_len: longest sequence, in tokens (rotary tables are made for it).
        draft_tokens: tokens that are to be guessed in a step by a draft layer of the model's, which it builds then.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kernels: KernelTable
    parallel: ParallelContext = field(default_factory=ParallelContext)
    max_model_len: int = 2048
    draft_tokens: int = 0

    def op(self, name: str, **facts: Any) -> Any:
        """The implementation of op ``name`` for a layer with these facts; the choice goes to the trace."""
        return self.kernels.bind(name, facts)


class Model(Protocol):
    """The contract as a type."""

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: Step,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def kv_specs(self) -> Mapping[int, KVSpec]: ...


__all__ = [
    "CONTRACT_VERSION", "BuildContext", "FullKV", "KVGroupStep", "KVSpec", "LatentKV", "Model", "NoKV",
    "ParallelContext", "SlidingKV", "StateKV", "Step",
]  # fmt: skip
