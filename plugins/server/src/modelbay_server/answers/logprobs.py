"""Log-probabilities in the two shapes that completions and chat have for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from modelbay_server.answers.json_text import Shaped

#: JSON has no minus infinity.
LOWEST = -9999.0


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def _text(entry: Any) -> str:
    return entry.decoded_token or ""


#: A token's bytes by its id; None where the tokenizer does not tell them.
BytesOf = Callable[[int], bytes | None]


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[Mapping[int, Any] | None],
    k: int,
    offsets: Iterable[int],
    first: str = "",
) -> dict[str, list[Any]]:
    """``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``; null where nothing predicts a token.

    Args:
        positions: for each token its entries, the token's own among them.
        k: how many of the likeliest were asked for.
        offsets: where in the text each token begins, in characters.
        first: the text of a token that nothing predicts.
    """
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, position, offset in zip(token_ids, positions, offsets, strict=True):
        text = first if position is None else _text(position[token_id])
        shown["tokens"].append(text)
        shown["token_logprobs"].append(None if position is None else _number(position[token_id].logprob))
        shown["top_logprobs"].append(None if position is None else _by_text(position, token_id, k))
        shown["text_offset"].append(offset)
    return shown


def _by_text(position: Mapping[int, Any], token_id: int, k: int) -> dict[str, float]:
    """Text to log-probability. Several tokens may read alike: the likeliest of them counts."""
    found: dict[str, float] = {}
    for entry in (position[shown] for shown in (*_top_ids(position, k), token_id)):
        text, logprob = _text(entry), _number(entry.logprob)
        found[text] = max(logprob, found.get(text, logprob))
    return found


def _top_ids(position: Mapping[int, Any], k: int) -> list[int]:
    return sorted(position, key=lambda token_id: (position[token_id].rank or 0, -position[token_id].logprob))[:k]


def chat_logprobs(
    token_ids: Sequence[int], positions: Iterable[Mapping[int, Any]], k: int, bytes_of: BytesOf
) -> dict[str, Any]:
    """``content``: an object for each token, with the k likeliest."""

    def entry(position: Mapping[int, Any], token_id: int) -> dict[str, Any]:
        own = bytes_of(token_id)
        return {
            "token": _text(position[token_id]),
            "logprob": _number(position[token_id].logprob),
            "bytes": None if own is None else list(own),
        }

    def shaped(run: Sequence[tuple[int, Mapping[int, Any]]]) -> list[dict[str, Any]]:
        return [
            {**entry(position, token_id), "top_logprobs": [entry(position, top) for top in _top_ids(position, k)]}
            for token_id, position in run
        ]

    return {"content": Shaped(list(zip(token_ids, positions, strict=True)), shaped), "refusal": None}


def prompt_logprobs(positions: Sequence[Mapping[int, Any] | None] | None) -> Sequence[dict[str, Any] | None] | None:
    """For each token of the prompt: token id to logprob, rank and text."""
    return None if positions is None else Shaped(positions, lambda run: [_position(position) for position in run])


def _position(position: Mapping[int, Any] | None) -> dict[str, Any] | None:
    if position is None:
        return None
    return {
        str(token_id): {"logprob": _number(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in position.items()
    }
