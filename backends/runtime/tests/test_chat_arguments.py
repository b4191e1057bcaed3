"""T4: ``chat_template_kwargs`` of `LLM.chat`: variables of the template, and arguments as vLLM's users spell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay.errors import UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "the fox"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "is"}]
TEMPLATE = (
    "{{ bos_token }}{% if loud %}LOUD{% endif %}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(checkpoint("llama"))) as opened:
        yield opened


def prompt_of(llm: LLM, given: Any, messages: Any = MESSAGES, **arguments: Any) -> str | None:
    arguments.setdefault("chat_template", TEMPLATE)
    [output] = llm.chat(messages, GREEDY, chat_template_kwargs=given, use_tqdm=False, **arguments)
    return output.prompt


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"add_generation_prompt": True}, {}),
        ({"add_generation_prompt": None, "tools": None}, {}),
        ({"tools": [{"name": "weather"}]}, {"tools": [{"name": "weather"}]}),
        ({"chat_template": "{{ messages[0].content }}!"}, {"chat_template": "{{ messages[0].content }}!"}),
    ],
)
def test_t4_an_argument_of_chat_may_stand_among_the_variables(llm: LLM, given: Any, arguments: Any) -> None:
    rest = {"chat_template": None} if "chat_template" in given else {}
    assert prompt_of(llm, given, **rest) == prompt_of(llm, None, **arguments)


def test_t4_continue_final_message_may_stand_among_the_variables(llm: LLM) -> None:
    rendered = prompt_of(llm, {"continue_final_message": True}, ANSWERED)
    assert rendered == prompt_of(llm, None, ANSWERED, continue_final_message=True)
    assert rendered is not None
    assert rendered.endswith("is")


def test_t4_variables_of_the_template_reach_it(llm: LLM, tmp_path: Path) -> None:
    assert "LOUD" in str(prompt_of(llm, {"loud": True}))
    assert "a paper" in str(prompt_of(llm, {"documents": [{"title": "", "text": "a paper"}]}))
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    assert "LOUD" in str(prompt_of(llm, {"loud": True}, chat_template=str(tmp_path / "own.jinja")))
    assert prompt_of(llm, {}) == prompt_of(llm, None)


@pytest.mark.parametrize("value", [False, None, "", [], {}])
def test_a_template_does_without_what_is_not_asked_for(llm: LLM, value: Any) -> None:
    """As clients send enable_thinking = False to whatever model."""
    assert prompt_of(llm, {"enable_thinking": value}) == prompt_of(llm, None)


@pytest.mark.parametrize(
    "name",
    ["tokenize", "prompt_room", "untrusted", "messages", "conversation", "tokenizer", "vocab_size", "media", "self",
     "return_dict", "padding", "tokenizer_kwargs"],
)  # fmt: skip
@pytest.mark.parametrize("value", [None, True])
def test_what_is_no_variable_but_an_argument_of_ours_is_refused(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"chat_template_kwargs: '{name}' is not the template's"):
        prompt_of(llm, {name: value})


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ("loud", {}, "is a mapping of variables of the template, got str"),
        ([("loud", True)], {}, "is a mapping of variables of the template, got list"),
        ({"quiet": True}, {}, "the model's template has no variable 'quiet'"),
        ({"loud": True}, {"chat_template": None}, "the model's template has no variable 'loud'"),
        ({5: True}, {}, "the model's template has no variable '5'"),
        ({"add_generation_prompt": "no"}, {}, "add_generation_prompt must be true or false, got 'no'"),
        ({"add_generation_prompt": True}, {"add_generation_prompt": False}, "add_generation_prompt was given twice"),
        ({"tools": [{"name": "b"}]}, {"tools": [{"name": "a"}]}, "tools was given twice"),
        ({"chat_template": "{{ messages }}"}, {}, "chat_template was given twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(llm: LLM, given: Any, arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prompt_of(llm, given, **arguments)
    assert not llm.engine.requests
