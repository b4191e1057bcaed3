"""Token ids: which are legal, and which stop a generation (T3, C10)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from modelbay.errors import UsageError

if TYPE_CHECKING:
    from modelbay.config import ModelConfig


def check_token_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for.

    ``vocab_size`` is the model's: ids that the tokenizer does not know are legal below it (padded vocabularies), and
    decode to empty text.

    Raises:
        UsageError: naming the first bad id, its position, and the range.
    """
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise UsageError(f"token ids must be integers, got {token!r} at position {position}.")
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"token id {token} at position {position} is outside the model's vocabulary: "
                f"ids are 0 to {vocab_size - 1}."
            )


def stop_token_ids(config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a generation: the union of config, generation config and tokenizer (C10)."""
    eos = getattr(tokenizer, "eos_token_id", None)
    own = () if eos is None else (eos,)
    return tuple(dict.fromkeys((*config.eos_token_ids, *own)))
