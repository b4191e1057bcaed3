"""Images and audio as flags, for the commands that generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from modelbay.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def media_options(command: F) -> F:
    """Decorate a click command with ``--image`` and ``--audio``; each may be given several times."""
    for kind, what in (("audio", "audio file"), ("image", "image file")):
        help_text = f"An {what}, or its URL, for every prompt; may be given several times."
        command = click.option(f"--{kind}", kind, multiple=True, metavar="PATH", help=help_text)(command)
    return command


def media_parts(images: Sequence[str], audios: Sequence[str]) -> list[dict[str, Any]]:
    """Parts of a message, images first.

    Raises:
        UsageError: a file that is not there; before anything is loaded.
    """
    given = [("image", source) for source in images] + [("audio", source) for source in audios]
    for kind, source in given:
        if "://" not in source and not source.startswith("data:") and not Path(source).expanduser().is_file():
            raise UsageError(f"{kind}: {source!r} is not a file.")
    return [{"type": kind, kind: source} for kind, source in given]


def with_media(text: str, parts: Sequence[dict[str, Any]]) -> Any:
    """A completion prompt with the media that its placeholders stand for."""
    if not parts:
        return text
    data: dict[str, list[Any]] = {}
    for part in parts:
        data.setdefault(part["type"], []).append(part[part["type"]])
    return {"prompt": text, "multi_modal_data": data}


def user_message(text: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A user's message: the media, then the text."""
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}
