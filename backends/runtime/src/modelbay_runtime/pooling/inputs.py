"""Texts and pairs of texts to the tokens that a pooling model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelbay.errors import ModelbayError, UsageError
from modelbay.pooling import PoolingSpec
from modelbay.tokenizer import (
    TooManyTokens,
    check_text,
    encode_at_most,
    encode_beginning,
    encode_end,
    encode_prompt,
    extra_bos,
    is_long,
    parts_of_pair,
)
from modelbay_runtime.engine.prompts import Prompt, PromptLike, PromptRoom, encoded, read_prompt
from modelbay_runtime.sampling_params import PoolingParams

#: Prompts that queries and documents get where a model has them, the first that it has.
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")


def numbered(items: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
    """``read`` of each; an error says which item it is about, in its message if there are several, and always as its
    ``prompt_index``.

    Raises:
        ModelbayError: as ``read`` raised it.
    """
    found = []
    for index, item in enumerate(items):
        try:
            found.append(read(item))
        except ModelbayError as error:
            if len(items) == 1:
                error.prompt_index = index  # type: ignore[attr-defined]
                raise
            named = type(error)(f"prompt {index}: {error.message}", hint=error.hint)
            named.prompt_index = index  # type: ignore[attr-defined]
            raise named from error
    return found


def check_truncation(tokenizer: Any, params: PoolingParams, max_model_len: int, *, pair: bool) -> None:
    """Raises:
    UsageError: a text (or pair) cannot be cut to so few tokens.
    """
    if params.truncate_prompt_tokens is not None and tokenizer is not None:
        _truncation(tokenizer, PromptRoom.of(params, max_model_len), pair=pair)


def check_takes_texts(spec: PoolingSpec | None) -> None:
    """Raises:
    UsageError: the model was made for conversations.
    """
    if spec is not None and spec.as_messages:
        raise UsageError(
            "this model puts every text into its chat template first (sentence_bert_config.json, modality_config), "
            "which is not done here.",
            hint="Give token ids of the rendered conversation, as prompt_token_ids.",
        )


def prompt_text(spec: PoolingSpec | None, name: str | None, prompt: str | None) -> str:
    """The text that is put before every text: the one given, the one of that name, or the model's default.

    Raises:
        UsageError: both are given, or the model has no prompt of that name.
    """
    prompts = spec.prompts if spec is not None else {}
    for what, given in (("prompt", prompt), ("prompt_name", name)):
        if not isinstance(given, str | None):
            raise UsageError(f"{what} is a string, got {type(given).__name__}.")
    if prompt is not None:
        if name is not None:
            raise UsageError("prompt and prompt_name were both given; give one.")
        return prompt
    if name is None:
        return prompts.get(spec.default_prompt, "") if spec is not None and spec.default_prompt else ""
    if name not in prompts:
        known = ", ".join(prompts) or "it has none"
        raise UsageError(f"the model has no prompt {name!r} (known: {known}).")
    return prompts[name]


def prompt_for(spec: PoolingSpec | None, names: tuple[str, ...]) -> str:
    """The first of these prompts that the model has (an empty one is one), else its default one."""
    name = next((name for name in names if spec is not None and name in spec.prompts), None)
    return prompt_text(spec, name, None)


def read_text(
    item: PromptLike, tokenizer: Any, vocab_size: int, params: PoolingParams, max_model_len: int, *,
    before: str = "", lower: bool = False,
) -> Prompt:  # fmt: skip
    """One text (or token ids) as a prompt. A text that is cut keeps its special tokens: the tokenizer cuts it.

    Args:
        before: a text that is put before it.
        lower: whether both are lower-cased.

    Raises:
        UsageError: it is no prompt; or ids, where something must be put before them.
    """
    is_mapping = isinstance(item, Mapping)
    text = item.get("prompt") if is_mapping and item.get("prompt_token_ids") is None else item
    if not isinstance(text, str):
        if before:
            raise UsageError("a prompt can be put before a text, not before token ids.")
        return read_prompt(item, tokenizer, vocab_size)
    room = PromptRoom.of(params, max_model_len)
    tokenizer, text = _lowered(tokenizer, before + text) if lower else (tokenizer, before + text)
    uncut = tokenizer is None or params.truncate_prompt_tokens is None
    if is_mapping or uncut:
        # The mapping as a whole: what else it has would be dropped.
        whole = text if uncut else ""
        prompt = read_prompt({**item, "prompt": whole} if is_mapping else whole, tokenizer, vocab_size, room=room)
        if uncut:
            return prompt
    return encoded(_encode_cut(tokenizer, text, room), text, vocab_size)


def read_pair(
    query: str, document: str, tokenizer: Any, vocab_size: int, params: PoolingParams, max_model_len: int,
    *, num_types: int | None, before: str = "", lower: bool = False,
) -> Prompt:  # fmt: skip
    """Two texts as one prompt, as the tokenizer joins them, each token with its text's number (its token type).

    Args:
        num_types: how many the model tells apart.
        before: a text that is put before the first.
        lower: whether both are lower-cased.

    Raises:
        UsageError: not texts, or more types than the model has.
    """
    for text in (query, document):
        if not isinstance(text, str):
            raise UsageError(f"a cross-encoder scores pairs of texts, got {type(text).__name__}.")
    if tokenizer is None:
        raise UsageError("a text prompt needs a tokenizer, and this model was loaded without one.")
    pair = (before + query, document)
    for text in pair:
        check_text(text)
    if lower:
        (lowering, first), (_, second) = (_lowered(tokenizer, text) for text in pair)
        tokenizer, pair = lowering, (first, second)
    ids, types = _encode_pair(tokenizer, pair, PromptRoom.of(params, max_model_len))
    if types is not None and num_types is not None and max(types, default=0) >= num_types:
        raise UsageError(f"the tokenizer gives token type {max(types)}, and the model has {num_types}.")
    prompt = encoded(ids, before + query, vocab_size)
    return Prompt(prompt.token_ids, prompt.text, types if types and any(types) else None)


def tokens_before(tokenizer: Any, before: str, *, lower: bool = False) -> int:
    """How many tokens of a text come from the prompt before it: its own, without a special one that ends it."""
    if lower:
        tokenizer, before = _lowered(tokenizer, before)
    ids = encode_prompt(tokenizer, before)
    return len(ids) - 1 if ids and ids[-1] in tokenizer.all_special_ids else len(ids)


def _encode_cut(tokenizer: Any, text: str, room: PromptRoom) -> list[int]:
    check_text(text)
    settings = _truncation(tokenizer, room, pair=False)
    longest = settings["max_length"]
    # The tokenizer keeps one end of the text, so that more of the other changes nothing once the ids are so many.
    from_right = tokenizer.truncation_side == "right"
    encode_end_kept = encode_beginning if from_right else encode_end

    def cut(count: int) -> list[int]:
        kept = {**settings, "max_length": count}
        return encode_end_kept(
            tokenizer, text, lambda part: list(tokenizer(part, verbose=False, **kept)["input_ids"]), count
        )

    ids = cut(longest)
    if not extra_bos(tokenizer, ids):
        return ids
    whole = list(tokenizer(text, verbose=False)["input_ids"])
    extra = extra_bos(tokenizer, whole)
    if len(whole) - extra <= longest:
        return whole[extra:]
    return cut(longest + extra)[extra:] if from_right else ids[extra_bos(tokenizer, ids) :]


def _encode_pair(tokenizer: Any, pair: tuple[str, str], room: PromptRoom) -> tuple[list[int], list[int] | None]:
    def alone(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    settings: dict[str, Any] = {}
    if room.keep is None:
        for text in pair:
            _check_alone(tokenizer, text, alone, room)
    else:
        settings = _truncation(tokenizer, room, pair=True)
        left = settings["max_length"] - tokenizer.num_special_tokens_to_add(pair=True)
        if tokenizer.truncation_side == "right":
            pair = parts_of_pair(tokenizer, pair, lambda text: len(alone(text)), left)
    # As a batch of one: of a single pair an empty second text is taken for none, and gives the template of one text.
    found = tokenizer([pair[0]], [pair[1]], verbose=False, **settings)
    types = found.get("token_type_ids")
    return list(found["input_ids"][0]), None if types is None else list(types[0])


def _lowered(tokenizer: Any, text: str) -> tuple[Any, str]:
    """What reads a text in lower case, and the text that it is given. Special tokens in it stay what they are."""
    lowering = getattr(tokenizer, "lowering", None)
    if lowering is not None or tokenizer is None:
        return lowering, text
    special = "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True)))
    parts = re.split(f"({special})", text) if special else [text]
    # By characters, as tokenizers do: a word's last sigma is no other letter.
    lower = ("".join(map(str.lower, part)) if place % 2 == 0 else part for place, part in enumerate(parts))
    return tokenizer, "".join(lower)


def _check_alone(tokenizer: Any, text: str, encode: Callable[[str], list[int]], room: PromptRoom) -> None:
    """Raises:
    UsageError: this text of a pair is far too long by itself.
    """
    try:
        if is_long(text, room.longest):
            encode_at_most(tokenizer, text, encode, room.longest)
    except TooManyTokens as error:
        raise room.too_long(f"more than {error.at_most}") from None


def _truncation(tokenizer: Any, room: PromptRoom, *, pair: bool) -> dict[str, Any]:
    """How a tokenizer is told to cut."""
    assert room.keep is not None
    longest = min(room.keep, room.longest)
    if longest <= tokenizer.num_special_tokens_to_add(pair=pair):
        raise UsageError(f"truncate_prompt_tokens={room.keep} leaves no room beside the tokenizer's special tokens.")
    return {"truncation": "longest_first", "max_length": longest}
