"""Into how many ranks the layers of a model can be sliced, by arithmetic alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelbay.errors import UsageError

if TYPE_CHECKING:
    from modelbay.config import ModelConfig
    from modelbay_runtime.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Share:
    """``size`` entries from ``start``: what one rank holds. ``pad`` more are nobody's, so that all hold as many."""

    start: int
    size: int
    pad: int = 0


def share_of(size: int, rank: int, ranks: int, what: str, *, heads: int | None = None) -> Share:
    """What ``rank`` of ``ranks`` holds of ``size`` entries.

    Args:
        what: the name of the size, for the message.
        heads: the entries are those of so many heads, none of which is cut: where there are fewer heads than ranks,
            several ranks hold the same one (BEHAVIOUR X9).

    Raises:
        UsageError: it does not divide, with the numbers.
    """
    units = size if heads is None else heads
    if units % ranks == 0:
        return Share(rank * (size // ranks), size // ranks)
    if heads is None or ranks % heads:
        raise UsageError(f"{what} = {units} does not divide over tensor_parallel_size = {ranks}.")
    return Share(rank // (ranks // heads) * (size // heads), size // heads)


def padded_share_of(size: int, rank: int, ranks: int) -> Share:
    """The same for entries that can be cut anywhere: the last ranks hold fewer, and are padded."""
    each = -(-size // ranks)
    start = min(rank * each, size)
    held = min(each, size - start)
    return Share(start, held, each - held)


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


def split_over(config: ModelConfig, size: int, *, whole_experts: bool = False) -> TensorParallelSize | str:
    """What a rank of ``size`` holds, or, in words, what does not divide.

    Args:
        whole_experts: experts are split by number, so that their widths need not divide.

    Heads and the widths of MLPs must divide. Of KV heads and ranks one must divide the other: fewer heads than ranks
    are replicated. The vocabulary is padded (BEHAVIOUR X9).
    """
    kv_heads = config.num_kv_heads or config.num_heads
    widths = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if not whole_experts:
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


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Refuse what does not divide, before anything is built (BEHAVIOUR D1).

    Raises:
        UsageError: every size that does not divide, with the numbers.
    """
    wrong = []
    if mesh.tp > 1 and config.num_heads:
        found = split_over(config, mesh.tp, whole_experts=mesh.expert_parallel)
        if isinstance(found, str):
            wrong.append(f"tensor_parallel_size = {mesh.tp}: {found}")
    if mesh.pp > config.num_layers:
        wrong.append(f"pipeline_parallel_size = {mesh.pp}: there are {config.num_layers} layers")
    ranks = mesh.dp * mesh.tp
    if mesh.expert_parallel and not config.num_experts:
        wrong.append("enable_expert_parallel: the model has no experts")
    elif mesh.expert_parallel and config.num_experts and config.num_experts % ranks:
        product = f"data_parallel_size × tensor_parallel_size = {mesh.dp} × {mesh.tp} = {ranks}"
        wrong.append(f"enable_expert_parallel: {config.num_experts} experts are not divisible by {product}")
    if wrong:
        sizes = ", ".join(str(size.size) for size in tensor_parallel_sizes(config))
        raise UsageError(
            f"the model does not divide like this: {'; '.join(wrong)}.",
            hint=f"Tensor parallel sizes that divide: {sizes}; stages: 1 to {config.num_layers}." if sizes else None,
        )
