"""What a layer keeps per token or per sequence. Specs of different kinds live side by side in one model.

Sizes are counted in elements; the cache's dtype turns them into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Base: a layer that keeps ``row`` elements for each token it has seen."""

    @property
    def row(self) -> int:
        """Elements per token."""
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """How many of the latest tokens are ever read again; None: all of them."""
        return None

    @property
    def per_sequence(self) -> int:
        """Elements kept once per sequence, whatever its length."""
        return 0


@dataclass(frozen=True, slots=True)
class FullKV(KVSpec):
    """Keys, then values, of every token: a row is ``[kv_heads * head_size | kv_heads * v_head_size]``."""

    kv_heads: int
    head_size: int
    v_head_size: int

    @property
    def row(self) -> int:
        return self.kv_heads * (self.head_size + self.v_head_size)


@dataclass(frozen=True, slots=True)
class SlidingKV(FullKV):
    """Keys and values of the last ``size`` tokens; blocks that fell out of the window are given back."""

    size: int

    @property
    def window(self) -> int | None:
        return self.size


@dataclass(frozen=True, slots=True)
class LatentKV(KVSpec):
    """One vector of ``size`` elements per token, shared by all heads."""

    size: int

    @property
    def row(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class NoKV(KVSpec):
    """Nothing is kept: encoder-only attention."""

    @property
    def row(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class StateKV(KVSpec):
    """A state of fixed size per sequence (recurrent and convolutional layers of hybrid models)."""

    size: int

    @property
    def row(self) -> int:
        return 0

    @property
    def per_sequence(self) -> int:
        return self.size
