"""What one forward pass needs to know beyond its tokens.

Legend: T tokens of the step, B sequences, M blocks per sequence. Sequences that decode (one new token) stand first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")


class _Scratch:
    """What kernels derive from a step once and share between layers (index lists, masks)."""

    __slots__ = ()
    scratch: dict[Any, Any]

    def cached(self, key: Any, compute: Callable[[], Value]) -> Value:
        """The value of ``key``, computed by the first layer that asks."""
        if key not in self.scratch:
            self.scratch[key] = compute()
        return self.scratch[key]


@dataclass(slots=True)
class KVGroupStep(_Scratch):
    """The step as seen by the layers of one KV group, which share block tables.

    Attributes:
        slots: [T] int64, where each new token's row goes: ``block * block_size + offset``.
        block_tables: [B, M] int32, blocks of each sequence, beginning with the one that holds position
            ``first_position[b]``.
        first_position: [B] int32, position of the first token in the table (0 unless a window slid past blocks).
        block_size: tokens in a block of this group.
    """

    slots: torch.Tensor
    block_tables: torch.Tensor
    first_position: torch.Tensor
    block_size: int
    scratch: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Step(_Scratch):
    """One forward pass.

    Attributes:
        positions: [T] int64, or [P, T] where a model's positions have several rows and they differ (M-RoPE).
        query_start: [B + 1] int32 cumulative new tokens; ``query_lens`` and ``context_lens`` are the same facts on
            the host: new tokens of each sequence, and its length including them.
        seq_lens: [B] int32, context_lens on the device.
        num_decodes: the first ``num_decodes`` sequences have exactly one new token.
        caches: layer index -> its cache ``[blocks, block_size, row]`` (absent for layers that keep nothing).
        groups: layer index -> the KVGroupStep that serves it.
        token_types: [T] int64, the number of each token's text in a pair of texts; None if all are 0.
        spans: [T] int32, -1, or the number of the span whose tokens attend to each other both ways; a span is in the
            step as a whole. None: there is none.
    """

    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int
    caches: dict[int, torch.Tensor] = field(default_factory=dict)
    groups: dict[int, KVGroupStep] = field(default_factory=dict)
    token_types: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[-1]

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)
