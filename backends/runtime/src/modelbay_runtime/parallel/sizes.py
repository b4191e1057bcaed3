"""Into how many ranks the layers of a model can be sliced, by arithmetic alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelbay.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorParallelSize:
    """What one of ``size`` ranks holds of each layer.

    Attributes:
        heads: query heads. kv_heads: of which ``kv_copies`` ranks hold the same ones.
        vocab: rows of the embedding, ``vocab_padding`` of all ranks' rows being no token.
    """

    size: int
    heads: int
    kv_heads: int
    kv_copies: int
    vocab: int
    vocab_padding: int

    def __str__(self) -> str:
        notes = [f"{self.kv_copies} copies of each KV head"] if self.kv_copies > 1 else []
        notes += [f"vocabulary padded by {self.vocab_padding}"] if self.vocab_padding else []
        return f"{self.size} ({', '.join(notes)})" if notes else str(self.size)


def tensor_parallel_sizes(config: ModelConfig) -> list[TensorParallelSize]:
    """Every size that divides; empty for a model without attention heads."""
    sizes = (split_over(config, size) for size in range(1, config.num_heads + 1))
    return [size for size in sizes if isinstance(size, TensorParallelSize)]


def split_over(config: ModelConfig, size: int) -> TensorParallelSize | str:
    """What a rank of ``size`` holds, or, in words, what does not divide.

    Heads and the widths of MLPs must divide. Of KV heads and ranks one must divide the other: fewer heads than ranks
    are replicated. The vocabulary is padded (BEHAVIOUR X9).
    """
    kv_heads = config.num_kv_heads or config.num_heads
    widths = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    widths["moe_intermediate_size"] = config.get("moe_intermediate_size")
    for name, width in widths.items():
        if isinstance(width, int) and width % size:
            return f"{name} {width} is not divisible by {size}"
    if kv_heads % size and size % kv_heads:
        return f"of num_key_value_heads {kv_heads} and {size} ranks neither divides the other"
    vocab = -(-config.vocab_size // size)
    return TensorParallelSize(
        size,
        heads=config.num_heads // size,
        kv_heads=max(kv_heads // size, 1),
        kv_copies=max(size // kv_heads, 1),
        vocab=vocab,
        vocab_padding=vocab * size - config.vocab_size,
    )
