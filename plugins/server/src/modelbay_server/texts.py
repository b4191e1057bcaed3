"""Prompts from what clients send, and texts from token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from modelbay.errors import UsageError
from modelbay.tokenizer import check_token_ids, encode_prompt
from modelbay.tokenizer import template_text as tokenizer_template
from modelbay_runtime.engine.chat_arguments import check_variables
from modelbay_runtime.engine.prompts import Prompt, PromptRoom, encode_text, read_prompt
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_server.models import LoadedModel


def read_prompts(
    model: LoadedModel, prompts: Sequence[Any], params: SamplingParams | None, *, add_special_tokens: bool = True
) -> list[Prompt]:
    """Texts and lists of token ids, as the engine takes them.

    Args:
        params: what will be done with them: of a text that is far too long for it no more is encoded than decides
            what becomes of it. None: all of it is.

    Raises:
        UsageError: ids outside the vocabulary, a text without a tokenizer, or one that is far too long.
    """
    room = None if params is None else model.llm.prompt_room(params)
    return [_read(model, prompt, add_special_tokens, room) for prompt in prompts]


def _read(model: LoadedModel, prompt: Any, add_special_tokens: bool, room: PromptRoom | None) -> Prompt:
    if add_special_tokens or not isinstance(prompt, str):
        return read_prompt(prompt, model.tokenizer, model.vocab_size, room=room)
    if model.tokenizer is None:
        raise UsageError("a text prompt needs a tokenizer, and this model was loaded without one.")
    encode = partial(encode_prompt, add_special_tokens=False)
    return encode_text(encode, model.tokenizer, prompt, model.vocab_size, room)


def read_chat(
    model: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
    params: SamplingParams | None,
    prefix: str = "",
) -> Prompt:
    """A conversation through the model's own template, and ``prefix`` as the beginning of the answer.

    Args:
        params: see `read_prompts`.

    Raises:
        UsageError: a variable that is not the template's, or tools that it would pass over in silence.
        TokenizerError: there is no template, or it refuses the conversation.
    """
    if variables and model.tokenizer is not None:
        check_variables(variables, template_text(model), model.tokenizer)
    given: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
        "prompt_room": None if params is None else model.llm.prompt_room(params),
        **variables,
    }
    prompt: Prompt = model.llm.render(messages, tools=tools, untrusted=True, **given)
    if tools and prompt.text == model.llm.render(messages, untrusted=True, **given).text:
        raise UsageError("tools were given, and the model's chat template has no place for them.")
    if prefix:
        ids = model.tokenizer(prefix, add_special_tokens=False, verbose=False)["input_ids"]
        prompt = replace(prompt, token_ids=[*prompt.token_ids, *ids], text=(prompt.text or "") + prefix)
    return prompt


def prepare(model: LoadedModel, params: SamplingParams) -> Any:
    """Compile what the output must be and encode what it must not hold, so that the engine's thread finds it done: that
    may take seconds.

    Returns:
        What is to be held until the engine has taken the request; else it would be made again.

    Raises:
        UsageError: it cannot be compiled.
    """
    engine = model.llm.engine
    return engine.grammars.constraint(params.structured_outputs, []), engine.bad_words.automaton(params.bad_words)


def template_text(model: LoadedModel) -> str:
    """The model's chat template; all of them, where it has several; "" where it has none."""
    has_one = bool(getattr(model.tokenizer, "chat_template", None))
    return tokenizer_template(model.tokenizer) if has_one else ""


def decode(model: LoadedModel, token_ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included; ids that the tokenizer does not know are empty text.

    Raises:
        UsageError: no tokenizer, or ids outside the model's vocabulary.
    """
    check_token_ids(token_ids, model.vocab_size)
    if model.tokenizer is None:
        raise UsageError("text needs a tokenizer, and this model was loaded without one.")
    known = [token_id for token_id in token_ids if token_id <= model.tokenizer.max_token_id]
    return str(model.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))
