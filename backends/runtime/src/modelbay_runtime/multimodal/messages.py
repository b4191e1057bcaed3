"""Images and audio in chat messages: OpenAI's content parts and Transformers', for templates of either kind.

A template takes a message's content as one text, or as a list of parts; which, it shows when it is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelbay.errors import ModelbayError, UsageError
from modelbay.tokenizer import encode_chat, render_chat
from modelbay_runtime.engine.prompts import Prompt, PromptRoom, encode_text
from modelbay_runtime.multimodal.reader import KINDS, MediaReader
from modelbay_runtime.multimodal.sources import decode_base64

Message = Mapping[str, Any]
_MARK = "a0b1c2"


def render_messages(
    messages: Any,
    tokenizer: Any,
    vocab_size: int,
    media: MediaReader,
    *,
    untrusted: bool = False,
    prompt_room: PromptRoom | None = None,
    **kwargs: Any,
) -> Prompt:
    """The prompt that a conversation becomes.

    Args:
        untrusted: the messages come over a network, so that they name no file but those that are allowed.
        prompt_room: see `read_prompt`.
        kwargs: as `modelbay.tokenizer.render_chat` takes them.

    Raises:
        UsageError: messages that are none, media that cannot be read, are not allowed or not taken.
        TokenizerError: the template refuses them.
    """
    conversation = Conversation([])
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        conversation = read_messages(messages)
        media.check({kind: len(items) for kind, items in conversation.items.items()})
    if conversation.has_parts or media.kinds:
        if media.kinds and kwargs.get("chat_template") is None and not getattr(tokenizer, "chat_template", None):
            kwargs["chat_template"] = media.processor.chat_template
        messages = fit_to_template(conversation, tokenizer, kwargs.get("chat_template"))
    text = str(render_chat(tokenizer, messages, tokenize=False, **kwargs))
    if not conversation.items:
        return encode_text(encode_chat, tokenizer, text, vocab_size, prompt_room)
    policy = media.policy(untrusted=untrusted)
    token_ids, found = media.read(text, conversation.items, policy, from_template=True)
    return Prompt(token_ids, text, media=found)


@dataclass(slots=True)
class Conversation:
    """Messages whose parts are ``{"type": "text", "text": …}``, ``{"type": "image"}`` or ``{"type": "audio"}``, and
    what the images and pieces of audio are, in their order."""

    messages: list[dict[str, Any]]
    items: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def has_parts(self) -> bool:
        return any(isinstance(message.get("content"), list) for message in self.messages)


def read_messages(messages: Sequence[Message]) -> Conversation:
    """Take the media out of messages.

    Raises:
        UsageError: a part that is none of those that are known, naming it.
    """
    found = Conversation([])
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = [_read_part(part, found.items) for part in content]
            found.messages.append({**message, "content": parts})
        else:
            found.messages.append(dict(message) if isinstance(message, Mapping) else message)
    return found


def fit_to_template(conversation: Conversation, tokenizer: Any, chat_template: str | None) -> list[dict[str, Any]]:
    """The messages in the form that the template takes.

    Raises:
        UsageError: there are images or audio, and the template takes texts alone.
    """
    takes_parts = _shows(tokenizer, chat_template, [{"type": "text", "text": _MARK}])
    if takes_parts and not _shows(tokenizer, chat_template, _MARK):
        return [_with_content(message, _as_parts) for message in conversation.messages]
    if takes_parts or not conversation.has_parts:
        return conversation.messages
    if conversation.items:
        kinds = " and ".join(conversation.items)
        raise UsageError(
            f"the chat template takes texts, and the messages have {kinds}.",
            hint="Give a chat_template that writes the model's placeholders, or use generate with multi_modal_data.",
        )
    return [_with_content(message, _as_text) for message in conversation.messages]


def _shows(tokenizer: Any, chat_template: str | None, content: Any) -> bool:
    """Whether the template writes the text of such a content, and not the list as Python prints it."""
    try:
        text = str(render_chat(tokenizer, [{"role": "user", "content": content}], chat_template, tokenize=False))
    except ModelbayError:
        return False
    return _MARK in text and "'text':" not in text and '"text":' not in text


def _with_content(message: dict[str, Any], form: Any) -> dict[str, Any]:
    return {**message, "content": form(message["content"])} if message.get("content") is not None else message


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _read_part(part: Any, items: dict[str, list[Any]]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise UsageError(f'a part of a message is {{"type": …}} or a string, got {type(part).__name__}.')
    kind = part["type"]
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise UsageError('a text part has its "text", a string.')
        return {"type": "text", "text": part["text"]}
    read = _READERS.get(kind)
    if read is None:
        raise UsageError(f"a part of a message is of type {kind!r}.", hint=f"Known: text, {', '.join(_READERS)}.")
    name = "audio" if "audio" in kind else "image"
    assert name in KINDS
    items.setdefault(name, []).append(read(part, kind))
    return {"type": name}


def _url_part(part: Message, kind: str) -> Any:
    """OpenAI's ``{"type": "image_url", "image_url": {"url": …}}``; the inner mapping may be the URL itself."""
    given = part.get(kind)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise UsageError(f'a part of type {kind} has {{"{kind}": {{"url": …}}}}.')
    return url


def _input_audio(part: Message, kind: str) -> Any:
    """OpenAI's ``{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}``."""
    given = part.get(kind)
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
        raise UsageError('a part of type input_audio has {"input_audio": {"data": base64, "format": …}}.')
    return decode_base64(given["data"], "audio")


def _transformers_part(part: Message, kind: str) -> Any:
    """Transformers' ``{"type": "image", "image" | "url" | "path" | "base64": …}``, and the same for audio."""
    given = {name: part[name] for name in (kind, "url", "path", "base64") if part.get(name) is not None}
    if len(given) != 1:
        raise UsageError(
            f"a part of type {kind} has one of {kind}, url, path and base64, got {', '.join(given) or 'none'}."
        )
    [(name, value)] = given.items()
    return decode_base64(value, kind) if name == "base64" and isinstance(value, str) else value


_READERS = {
    "image_url": _url_part,
    "input_audio": _input_audio,
    "audio_url": _url_part,
    "image": _transformers_part,
    "audio": _transformers_part,
}
