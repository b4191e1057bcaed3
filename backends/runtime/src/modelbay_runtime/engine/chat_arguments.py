"""What `LLM.chat` hands to the chat template: its own arguments, and the variables of ``chat_template_kwargs``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from modelbay.errors import UsageError
from modelbay.tokenizer import template_text
from modelbay_runtime.multimodal.messages import render_messages
from modelbay_runtime.multimodal.reader import MediaReader

#: Arguments of `LLM.chat` that code written for vLLM gives among the variables, and what they are if nobody says so.
_OWN: Mapping[str, Any] = {
    "chat_template": None,
    "tools": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
}
#: An argument of Transformers' own function, and yet what many templates read.
_VARIABLE = "documents"


def chat_arguments(own: Mapping[str, Any], given: Any, tokenizer: Any, media: MediaReader) -> dict[str, Any]:
    """One mapping of all arguments for `LLM.render`.

    Args:
        own: the arguments of the call itself, by the names in `_OWN`.
        given: ``chat_template_kwargs``.

    Raises:
        UsageError: ``given`` is no mapping, says what the call says otherwise, or has a name that is no variable of the
            template, naming it.
    """
    if given is None or given == {}:
        return dict(own)
    if not isinstance(given, Mapping):
        raise UsageError(f"chat_template_kwargs is a mapping of variables of the template, got {type(given).__name__}.")
    found = {**own, **_own_names(own, given)}
    variables = {name: value for name, value in given.items() if name not in _OWN}
    if variables and tokenizer is not None:
        check_variables(variables, _template(tokenizer, found["chat_template"], media), tokenizer)
    return {**found, **variables}


def _own_names(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: given[name] for name in _OWN if given.get(name) is not None}
    for name, value in found.items():
        if isinstance(_OWN[name], bool) and not isinstance(value, bool):
            raise UsageError(f"chat_template_kwargs: {name} must be true or false, got {value!r:.100}.")
        if own[name] not in (_OWN[name], value):
            raise UsageError(f"{name} was given twice, and chat_template_kwargs says otherwise.", hint="Give it once.")
    return found


def _template(tokenizer: Any, chat_template: str | None, media: MediaReader) -> str:
    if chat_template is None and not getattr(tokenizer, "chat_template", None) and media.kinds:
        chat_template = media.processor.chat_template
    return template_text(tokenizer, chat_template)


def check_variables(variables: Mapping[Any, Any], template: str, tokenizer: Any) -> None:
    """Only variables that the template reads, or that are false, null or empty: a template without
    ``enable_thinking`` does as ``False`` asks. What says how a template is applied, as another template does or the
    path of one, is none.

    Raises:
        UsageError: naming the first that is not one.
    """
    meant = {"self", *inspect.signature(render_messages).parameters}
    meant |= {*inspect.signature(tokenizer.apply_chat_template).parameters} - {_VARIABLE}
    meant |= set(_OWN)
    for name in variables:
        is_name = isinstance(name, str) and name.isidentifier()
        if is_name and name in meant:
            raise UsageError(
                f"chat_template_kwargs: {name!r} is not the template's: it says how a template is applied.",
                hint="Leave it out.",
            )
        if is_name and (_is_nothing(variables[name]) or re.search(rf"\b{re.escape(name)}\b", template)):
            continue
        raise UsageError(f"chat_template_kwargs: the model's template has no variable {str(name)[:100]!r}.")


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, bool | str | list | dict) and not value)
