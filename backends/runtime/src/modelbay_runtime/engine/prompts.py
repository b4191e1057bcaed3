"""What may stand for a prompt, and the token ids it becomes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from modelbay.errors import TokenizerError, UsageError
from modelbay.tokenizer import TooManyTokens, check_token_ids, encode_prompt
from modelbay_runtime.multimodal.data import Media
from modelbay_runtime.multimodal.reader import MediaReader
from modelbay_runtime.sampling_params import PoolingParams, SamplingParams

#: str, {"prompt": str}, {"prompt_token_ids": [int]}, or [int]; a mapping may have multi_modal_data: {"image": …,
#: "audio": …}, one item of each kind or a list. An array or tensor of one dimension will do for a list of ids.
PromptLike = Any

_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
_LEAVE_OUT = "Leave it out."
#: Keys that vLLM has, and what to do instead. Without them the output would be another one, or not kept apart.
_UNSERVED: Mapping[str, str] = {
    **dict.fromkeys(
        ("mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "encoder_prompt", "decoder_prompt"), _LEAVE_OUT
    ),
    "token_type_ids": "Pairs of texts are for score, which numbers their tokens.",
    "cache_salt": "With enable_prefix_caching=False no request reads what another has computed.",
}
#: What vLLM's own functions write beside a prompt: which of the two it is.
_TYPES: Mapping[str, str] = {"text": "prompt", "token": "prompt_token_ids"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text they came from if they did.

    Args:
        token_types: of a pair of texts, the number of each token's text.
        media: images and audio, whose places are among the token ids.
        not_pooled: so many first tokens are left out where hidden states are pooled.
    """

    token_ids: list[int]
    text: str | None = None
    token_types: list[int] | None = None
    not_pooled: int = 0
    media: Media | None = None


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """How long the prompt of a request may be.

    Args:
        longest: tokens.
        keep: a longer prompt is cut to so many last tokens; None: it is refused.
        max_model_len: tokens of prompt and output.
    """

    longest: int
    keep: int | None
    max_model_len: int

    @classmethod
    def of(cls, params: SamplingParams | PoolingParams, max_model_len: int) -> PromptRoom:
        """A request that generates needs room for one token of output."""
        longest = max_model_len - 1 if isinstance(params, SamplingParams) else max_model_len
        keep = params.truncate_prompt_tokens
        return cls(longest, longest if keep == -1 else keep, max_model_len)

    def too_long(self, found: str) -> UsageError:
        """The refusal of a prompt with ``found`` tokens."""
        room = " leave room for output" if self.longest < self.max_model_len else " are served"
        return UsageError(
            f"the prompt has {found} tokens; with max_model_len={self.max_model_len} at most {self.longest}{room}.",
            hint="Shorten it, set truncate_prompt_tokens, or raise max_model_len if the model allows it.",
        )

    def encode(self, encode: Callable[..., list[int]], tokenizer: Any, text: str, vocab_size: int) -> list[int]:
        """The ids of a text as far as this request needs them.

        Raises:
            UsageError: there are too many.
        """
        if self.keep is not None and self.keep <= self.longest:
            # Ids that the model has not are refused wherever they stand.
            last = self.keep if tokenizer.max_token_id < vocab_size else None
            return encode(tokenizer, text, last=last)
        try:
            return encode(tokenizer, text, at_most=self.longest)
        except TooManyTokens as error:
            raise self.too_long(f"more than {error.at_most}") from None


def listed(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping, Prompt)) or _is_array(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise UsageError(f"a prompt is a string, a mapping or a list of them, got {type(prompts).__name__}.")
    if prompts and all(_is_integer(item) for item in prompts):
        return [prompts]
    return list(prompts)


def read_prompts(
    prompts: Sequence[PromptLike],
    tokenizer: Any,
    vocab_size: int,
    media: MediaReader,
    rooms: Sequence[PromptRoom],
) -> list[Prompt]:
    """Token ids of several prompts. See `read_prompt`; an error over a mapping says of which prompt."""
    found = []
    for place, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
        try:
            found.append(read_prompt(prompt, tokenizer, vocab_size, media, room))
        except UsageError as error:
            if len(prompts) == 1 or not isinstance(prompt, Mapping):
                raise
            raise UsageError(f"prompt {place}: {error.message}", hint=error.hint) from error
    return found


def read_prompt(
    prompt: PromptLike,
    tokenizer: Any,
    vocab_size: int,
    media: MediaReader | None = None,
    room: PromptRoom | None = None,
) -> Prompt:
    """Token ids of one prompt.

    Args:
        media: reads images and audio; None: there must be none.
        room: of a text that is far too long for it no more is encoded than decides what becomes of it; None: all is.

    Raises:
        UsageError: not a prompt, no tokenizer for a text, ids outside the vocabulary, images and audio that cannot
            be read or that the model does not take, or a text that is far too long.
    """
    if isinstance(prompt, Prompt):
        return prompt
    items: dict[str, list[Any]] = {}
    if isinstance(prompt, Mapping):
        items = _media_items(prompt, media)
        ids = prompt.get("prompt_token_ids")
        if isinstance(ids, str):
            raise UsageError("prompt_token_ids is a list of token ids, got a string.", hint="Give it as prompt.")
        prompt = prompt["prompt"] if ids is None else ids
    if media is not None and media.required and not items:
        raise UsageError(f"the prompt has neither image nor audio, and {media.name} does not run on text alone.")
    if items and media is not None and isinstance(prompt, str):
        expanded, read = media.read(prompt, items, media.policy())
        return Prompt(expanded, prompt, media=read)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError("a text prompt needs a tokenizer, and this model was loaded without one.")
        return encode_text(encode_prompt, tokenizer, prompt, vocab_size, room)
    token_ids = _token_ids(prompt)
    if items and media is not None:
        expanded, read = media.read(token_ids, items, media.policy())
        return Prompt(expanded, media=read)
    check_token_ids(token_ids, vocab_size)
    return Prompt(token_ids)


def _token_ids(given: Any) -> list[int]:
    if _is_array(given):
        if given.ndim != 1:
            raise UsageError(
                f"the token ids of a prompt have one dimension, got an array of {given.ndim}.",
                hint="Give a list with one prompt for each row.",
            )
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise UsageError(f"a prompt is a string or a list of token ids, got {type(given).__name__}.")
    wrong = next((place for place, item in enumerate(given) if not _is_integer(item)), None)
    if wrong is not None:
        found = f"got {given[wrong]!r:.50} at position {wrong}."
        if isinstance(given[wrong], bool):
            raise UsageError(f"token ids must be integers, {found}")
        raise UsageError(f"a prompt is a string or a list of token ids, {found}")
    return list(map(int, given))


def _is_integer(item: Any) -> bool:
    # The first alone for most: to ask for an abstract class takes longer, and long prompts ask often.
    return type(item) is int or (isinstance(item, Integral) and not isinstance(item, bool))


def _is_array(given: Any) -> bool:
    """Of NumPy, or a tensor; neither is imported for that."""
    return hasattr(given, "ndim") and hasattr(given, "tolist")


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Raises:
    UsageError: no prompt or two, or a key that means nothing here: what it stands for would be missing.
    """
    given = [name for name, value in prompt.items() if value is not None]
    for name in given:
        if name in _UNSERVED:
            raise UsageError(f"a prompt mapping has {name!r}, which is not served.", hint=_UNSERVED[name])
    if ("prompt" in given) == ("prompt_token_ids" in given):
        found = ", ".join(map(str, prompt)) or "nothing"
        hint = "Use chat for conversations." if {"role", "content", "messages"} & set(given) else None
        raise UsageError(f"a prompt mapping has either 'prompt' or 'prompt_token_ids', got {found}.", hint=hint)
    if "type" in given:
        _check_type(prompt)
    for name in given:
        if name not in (*_KEYS, "type"):
            near = difflib.get_close_matches(str(name), _KEYS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(_KEYS)}."
            raise UsageError(f"a prompt mapping has {str(name)[:100]!r}, which is not known.", hint=hint)


def _check_type(prompt: Mapping[str, Any]) -> None:
    kind = prompt["type"]
    key = _TYPES.get(kind) if isinstance(kind, str) else None
    if key is None or prompt.get(key) is None:
        known = " and ".join(f"{name!r} with {of}" for name, of in _TYPES.items())
        raise UsageError(f"a prompt mapping has the type {kind!r:.50}; served are {known}.", hint=_LEAVE_OUT)


def _media_items(prompt: Mapping[str, Any], media: MediaReader | None) -> dict[str, list[Any]]:
    _check_keys(prompt)
    data = prompt.get("multi_modal_data")
    if not data:
        return {}
    if media is None:
        raise UsageError("images and audio are not taken here, and the prompt has multi_modal_data.")
    return media.listed(data)


def encode_text(
    encode: Callable[..., list[int]], tokenizer: Any, text: str, vocab_size: int, room: PromptRoom | None
) -> Prompt:
    """A text by `encode_prompt` or `encode_chat`, as far as a request with this room needs it."""
    ids = encode(tokenizer, text) if room is None else room.encode(encode, tokenizer, text, vocab_size)
    return encoded(ids, text, vocab_size)


def encoded(token_ids: Sequence[int], text: str, vocab_size: int) -> Prompt:
    """What a tokenizer made of a text.

    Raises:
        TokenizerError: it has tokens that the model has not.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise TokenizerError(
            f"the tokenizer gives token id {largest}; the model's ids are 0 to {vocab_size - 1}.",
            hint="Tokenizer and model do not belong together; name another with tokenizer=…",
        )
    return Prompt(list(token_ids), text)


def fit_prompt(prompt: Prompt, params: SamplingParams | PoolingParams, max_model_len: int) -> list[int]:
    """The ids that will be computed: truncated if the request asks for it, refused if they are too many.

    Raises:
        UsageError: an empty prompt, or one that is too long, with both lengths.
    """
    token_ids = prompt.token_ids
    if not token_ids:
        raise UsageError("the prompt is empty: there is no token to continue from.")
    room = PromptRoom.of(params, max_model_len)
    if room.keep is not None:
        token_ids = token_ids[-room.keep :]
    if len(token_ids) > room.longest:
        raise room.too_long(str(len(token_ids)))
    return token_ids


def check_tokens(token_ids: list[int], model: Any) -> None:
    """Refuse what this model cannot compute right (``refused_tokens`` of the model contract).

    Raises:
        UsageError: the prompt has such a token, with the reason.
    """
    refused: Mapping[int, str] = getattr(model, "refused_tokens", {})
    for token_id in refused.keys() & set(token_ids) if refused else ():
        raise UsageError(f"the prompt has token {token_id}, which {refused[token_id]}: it is not served.")
