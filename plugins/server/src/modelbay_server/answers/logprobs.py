"""Log-probabilities in the two shapes that completions and chat have for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: JSON has no minus infinity.
LOWEST = -9999.0


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def _text(entry: Any) -> str:
    return entry.decoded_token or ""


def completion_logprobs(
    token_ids: Sequence[int], positions: Iterable[Mapping[int, Any] | None], k: int, offset: int, first: str = ""
) -> dict[str, Any]:
    """``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``; null where nothing predicts a token.

    Args:
        positions: for each token its entries, the token's own among them.
        k: how many of the likeliest were asked for.
        offset: characters of text before the first token; below zero for a token that the text does not show.
        first: the text of a token that nothing predicts.
    """
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, position in zip(token_ids, positions, strict=True):
        text = first if position is None else _text(position[token_id])
        shown["tokens"].append(text)
        shown["token_logprobs"].append(None if position is None else _number(position[token_id].logprob))
        shown["top_logprobs"].append(None if position is None else _by_text(position, token_id, k))
        shown["text_offset"].append(max(offset, 0))
        offset += len(text)
    return shown


def _by_text(position: Mapping[int, Any], token_id: int, k: int) -> dict[str, float]:
    """Text to log-probability. Several tokens may read alike: the likeliest of them counts."""
    found: dict[str, float] = {}
    for entry in [*_top(position, k), position[token_id]]:
        text, logprob = _text(entry), _number(entry.logprob)
        found[text] = max(logprob, found.get(text, logprob))
    return found


def _top(position: Mapping[int, Any], k: int) -> list[Any]:
    ranked = sorted((entry for entry in position.values()), key=lambda entry: (entry.rank or 0, -entry.logprob))
    return ranked[:k]


def chat_logprobs(token_ids: Sequence[int], positions: Iterable[Mapping[int, Any]], k: int) -> dict[str, Any]:
    """``content``: an object for each token, with the k likeliest."""
    return {
        "content": [
            {**_entry(position[token_id]), "top_logprobs": [_entry(entry) for entry in _top(position, k)]}
            for token_id, position in zip(token_ids, positions, strict=True)
        ],
        "refusal": None,
    }


def _entry(entry: Any) -> dict[str, Any]:
    text = _text(entry)
    # A token that is a part of a character has no bytes that its text would tell.
    return {
        "token": text,
        "logprob": _number(entry.logprob),
        "bytes": None if "�" in text else list(text.encode()),
    }


def prompt_logprobs(positions: Sequence[Mapping[int, Any] | None] | None) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt: token id to logprob, rank and text."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _number(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in position.items()
        }
        for position in positions
    ]
