"""Prompts to token ids: chat templates, and exactly one BOS whichever way a prompt came (T4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelbay.errors import TokenizerError, UsageError, one_line, one_line_with_type
from modelbay.small_files import read_text
from modelbay.tokenizer.bounded import encode_at_most, encode_end


def encode_prompt(
    tokenizer: Any,
    text: str,
    *,
    add_special_tokens: bool = True,
    at_most: int | None = None,
    last: int | None = None,
) -> list[int]:
    """The ids of a completion prompt.

    Args:
        at_most: more ids than these are refused, and a far longer text is not encoded for that.
        last: only so many last ids matter; of a far longer text those before them may be left out.

    Raises:
        TooManyTokens: a long text has more than ``at_most``. One that is not long is for the caller to count.

    A tokenizer that puts a BOS before every text would double one that the text already starts with, as it does when
    it was rendered by a chat template: then one stays.
    """
    check_text(text)

    def encode(part: str) -> list[int]:
        ids = _ids(tokenizer, part, add_special_tokens=add_special_tokens)
        return _one_bos(tokenizer, ids) if add_special_tokens else ids

    return _bounded(tokenizer, text, encode, at_most, last)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    *,
    continue_final_message: bool = False,
    tokenize: bool = True,
    **variables: Any,
) -> list[int] | str:
    """A conversation as token ids, or as text with ``tokenize=False``.

    Args:
        messages: ``{"role": …, "content": …}``, oldest first.
        chat_template: a template, the path of a file that holds one, or the name of one of the tokenizer's; the
            tokenizer's own if None.
        variables: further variables for the template.

    Raises:
        TokenizerError: there is no template, or the template fails or refuses the conversation.
        UsageError: the messages are not a conversation.
    """
    _check_messages(messages)
    template = _template(tokenizer, chat_template)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tokenize=False,
            **variables,
        )
    except Exception as error:  # templates are programs: whatever one raises is its word on the conversation
        raise TokenizerError(f"the chat template cannot render this conversation: {one_line(error)}.") from error
    return encode_chat(tokenizer, text) if tokenize else text


def template_text(tokenizer: Any, chat_template: str | None = None) -> str:
    """The template that `render_chat` would use; all of them, where the tokenizer has several and none is named.

    Raises:
        TokenizerError, UsageError: there is none, or it cannot be read.
    """
    named = _template(tokenizer, chat_template)
    found = tokenizer.chat_template if named is None else named
    own = getattr(tokenizer, "chat_template", None)
    if named is not None and isinstance(own, Mapping):
        found = own.get(named, named)
    return "\n".join(map(str, found.values())) if isinstance(found, Mapping) else str(found)


def encode_chat(tokenizer: Any, text: str, *, at_most: int | None = None, last: int | None = None) -> list[int]:
    """The ids of a rendered conversation. The template writes the special tokens; a BOS it forgot is added.

    ``at_most`` and ``last`` as for `encode_prompt`.
    """
    check_text(text)

    def encode(part: str) -> list[int]:
        ids = _ids(tokenizer, part, add_special_tokens=False)
        bos = tokenizer.bos_token_id
        if tokenizer.adds_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        return _one_bos(tokenizer, ids)

    return _bounded(tokenizer, text, encode, at_most, last)


def _bounded(
    tokenizer: Any, text: str, encode: Callable[[str], list[int]], at_most: int | None, last: int | None
) -> list[int]:
    if last is not None:
        # Special tokens stand before an end of the text too.
        return encode_end(tokenizer, text, encode, last + tokenizer.num_special_tokens_to_add() + 1)
    return encode(text) if at_most is None else encode_at_most(tokenizer, text, encode, at_most)


def check_text(text: str) -> None:
    """Raises:
    UsageError: the text holds half a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt is not text: character {error.start} is half of one (U+{ord(text[error.start]):04X}).",
            hint="Were its bytes not UTF-8?",
        ) from error


def _ids(tokenizer: Any, text: str, **kwargs: Any) -> list[int]:
    """What the tokenizer makes of a text.

    Raises:
        TokenizerError: the tokenizer's files make it fail on any text, or on this one.
    """
    try:
        # Not verbose: the engine says itself when a prompt is too long.
        return list(tokenizer(text, verbose=False, **kwargs)["input_ids"])
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the Rust tokenizer is no Exception
        raise TokenizerError(
            f"the tokenizer cannot encode the prompt: {one_line_with_type(error)}.",
            hint="Its files do not fit together; name another with tokenizer=…",
        ) from error


def extra_bos(tokenizer: Any, ids: list[int]) -> int:
    """How many ids at the beginning are a BOS before another, where the tokenizer puts one before every text."""
    if not tokenizer.adds_bos:
        return 0
    bos = tokenizer.bos_token_id
    extra = 0
    while len(ids) > extra + 1 and ids[extra] == bos and ids[extra + 1] == bos:
        extra += 1
    return extra


def _one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids[extra_bos(tokenizer, ids) :]


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise UsageError('messages must be a non-empty list of {"role": …, "content": …}.')
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f'message {position} must be an object with a "role", got {message!r}.')


def _template(tokenizer: Any, chat_template: str | None) -> str | None:
    if chat_template is None:
        if not getattr(tokenizer, "chat_template", None):
            raise TokenizerError(
                "the tokenizer has no chat template, so chat is not possible; completion is.",
                hint="Give one with chat_template=… (a template or a file).",
            )
        return None
    if not isinstance(chat_template, str):
        raise UsageError(f"chat_template must be a template, or the path or name of one, got {chat_template!r}.")
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    named = getattr(tokenizer, "chat_template", None)
    if isinstance(named, Mapping) and chat_template in named:
        return chat_template
    try:
        return read_text(Path(chat_template).expanduser())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"chat_template {chat_template!r} is neither a template nor a file that can be read.",
            hint="A template contains {{ … }}.",
        ) from error
