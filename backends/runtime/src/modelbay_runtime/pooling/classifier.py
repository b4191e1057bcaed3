"""Classifiers: what the pooler asks of one, which of a sequence's tokens its head reads, and native models as such.

Legend: n sequences, T tokens, H hidden size, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay.resolve import Resolution
from modelbay.weights.matching import ANOTHER_STAGE
from modelbay.weights.transforms import Ignore
from modelbay_runtime.api import BuildContext, KVSpec, Step
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.layers.embedding import Head
from modelbay_runtime.layers.linear import Linear

NOT_FOR_POOLING = "of a model that generates"
NOT_FOR_EMBEDDING = "of a model that classifies"


class Classifier(Protocol):
    """The model contract's part for classification.

    Attributes:
        reads: "first", "last" (the last token that is no padding), or "all": whether ``classify`` gets the one row
            that its head reads of each sequence, or a single sequence as a whole.
    """

    reads: str

    def classify(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """[n, T, H] and [n, T] -> logits [n, C]."""


def row_read(token_ids: Sequence[int], reads: str, pad_token_id: int | None) -> int:
    """The position that a head reads; what Transformers' heads call the last token is the last that is no padding."""
    if reads == "first":
        return 0
    if pad_token_id is None:
        return len(token_ids) - 1
    return next((at for at in range(len(token_ids) - 1, -1, -1) if token_ids[at] != pad_token_id), 0)


class NativePoolingModel(nn.Module):
    """A native model that generates, without its head over the vocabulary; with ``score`` where it classifies.

    Parameters keep the names that the family gives them.
    """

    reads = "last"

    def __init__(self, inner: Any, heads: Sequence[str], score: nn.Module | None) -> None:
        super().__init__()
        self._parameters, self._buffers = inner._parameters, inner._buffers
        self._non_persistent_buffers_set = inner._non_persistent_buffers_set
        self._modules.update({name: child for name, child in inner._modules.items() if name not in heads})
        if score is not None:
            self.score = score
        self._inner = (inner,)  # in a tuple, so that torch does not count its parameters twice
        transforms = tuple(Ignore(rf"^{name}\.", NOT_FOR_POOLING, unless_known=True) for name in heads)
        self.checkpoint_transforms: Any = transforms

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: Step,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids (or [T, H] embeddings) and [T] positions -> [T, H]."""
        hidden: torch.Tensor = self._inner[0].forward(input_ids, positions, step, inputs_embeds)
        return hidden

    def classify(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """[n, 1, H] -> [n, C]."""
        logits: torch.Tensor = self.score(hidden[:, -1])
        return logits

    def kv_specs(self) -> Mapping[int, KVSpec]:
        specs: Mapping[int, KVSpec] = self._inner[0].kv_specs()
        return specs


def as_pooling_model(module: nn.Module, resolution: Resolution, build: BuildContext) -> nn.Module:
    """A native model built for a pooling task: as it is if its family wrote it for that, else converted (A1).

    Raises:
        BackendError: it has no head over the vocabulary that could be left out.
    """
    task, arch = resolution.task, resolution.arch
    if task == "generate" or (arch is not None and task in arch.tasks):
        return module
    heads = [name for name, child in module.named_children() if isinstance(child, Head | Absent)]
    if not heads:
        raise BackendError(f"{type(module).__name__} has no Head among its children, so it cannot be made to {task}.")
    score: nn.Module | None = None
    if task == "classify" and not build.parallel.is_last_stage:
        score = Absent(ANOTHER_STAGE)
    elif task == "classify":
        assert resolution.pooling is not None
        assert resolution.pooling.num_labels is not None
        score = Linear(build, resolution.config.hidden_size, resolution.pooling.num_labels)
    found = NativePoolingModel(module, heads, score)
    found.checkpoint_transforms = (*(arch.transforms if arch else ()), *found.checkpoint_transforms)
    if task == "embed":
        found.checkpoint_transforms += (Ignore(r"^score\.", NOT_FOR_EMBEDDING, unless_known=True),)
    if hasattr(module, "max_positions"):
        found.max_positions = module.max_positions
    if hasattr(module, "refused_tokens"):
        found.refused_tokens = module.refused_tokens
    resolution.trace.decide("build", "head", "score" if score is not None else "none", f"conversion to {task}")
    return found


def read_by(
    classify: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    like: torch.Tensor,
    pad: int | None,
    ids: Sequence[int],
) -> str:
    """Which token a head reads, by trial: rows of random hidden states are changed one by one, among ordinary tokens
    and among special ones, and it is seen when the logits change. "all" where that is not one token by rule.

    Args:
        classify: its parameters are loaded. like: a tensor of the hidden states' size, dtype and device.
        ids: token ids that may mean something to it (the first is an ordinary one).
    """
    plain, *special = ids
    patterns = [[plain] * 5]
    patterns += [[plain, token, plain, plain, plain] for token in special]
    patterns += [[plain, plain, plain, plain, token] for token in special]
    for reads in ("first", "last"):
        if all(_changes(classify, like, tokens) == {row_read(tokens, reads, pad)} for tokens in patterns):
            return reads
    return "all"


def _changes(
    classify: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], like: torch.Tensor, tokens: list[int]
) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(len(tokens) + 1, like.shape[-1], generator=generator).to(like.dtype).to(like.device)
    ids = torch.tensor([tokens], device=like.device)
    rows, other = made[:-1], made[-1]
    before = classify(rows[None], ids)
    changed = set()
    for place in range(len(tokens)):
        moved = rows.clone()
        moved[place] = other
        if not torch.equal(classify(moved[None], ids), before):
            changed.add(place)
    return changed
