"""Tools: what reaches the template, calls that come back, and calls that are forced."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from modelbay import LLM, SamplingParams
from modelbay_runtime.structured.compiler import compile_grammar
from modelbay_runtime.structured.grammars import _Vocabulary
from modelbay_server.answers.chat import ChatAnswer
from modelbay_server.answers.tool_calls import ToolReader
from modelbay_server.schemas.chat import ChatBody
from modelbay_server.tool_forms import Hermes, Llama3Json, Mistral, ToolForm, calls_in, tool_form

HELLO = [{"role": "user", "content": "The quick brown fox?"}]
BODY = {"messages": HELLO, "temperature": 1.0, "max_tokens": 300}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Ulm"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": 'clo"ck'}}
UNSUPPORTED = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
FUNCTIONS = [WEATHER["function"], CLOCK["function"]]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# -- the template


def test_tools_that_the_template_passes_over_are_refused(server: Any) -> None:
    response = server.post("/v1/chat/completions", {**BODY, "tools": [WEATHER]})
    assert response.status_code == 400
    assert "no place for them" in response.json()["error"]["message"]
    assert server.post("/v1/chat/completions", {**BODY, "tools": [WEATHER], "tool_choice": "none"}).status_code == 200


def test_tools_and_variables_reach_the_template(tool_server: Any) -> None:
    def rendered(**more: Any) -> str:
        ids = tool_server.post("/tokenize", {"messages": HELLO, **more}).json()["tokens"]
        return str(tool_server.post("/detokenize", {"tokens": ids}).json()["prompt"])

    assert "tools: weather <tool_call>" in rendered(tools=[WEATHER])
    assert "LOUD" in rendered(chat_template_kwargs={"shout": True})
    assert "LOUD" not in rendered()
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    assert "Bonn" in rendered(messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])
    answer = tool_server.post("/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER], "max_tokens": 4})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ x }}<tool_call>{}</tool_call>", Hermes),
        ("<tool_call>\n<function=name>", None),
        ("<tool_call>{name}\n<arg_key>", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
         Llama3Json),
        ("{{ '\"parameters\": dictionary of argument name' }} <|python_tag|>", Llama3Json),
        ("{{ '[TOOL_CALLS]' }}", Mistral),
        ("no tools at all", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_form_is_what_the_template_speaks_of(template: str, form: type | None) -> None:
    assert type(tool_form("auto", template)) is (form or type(None))
    assert type(tool_form("hermes", template)) is Hermes
    assert tool_form("none", template) is None


# -- calls that come back

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Bonn"}}'
LATER = '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}'
MISTRAL = '[{"name": "weather", "arguments": {"city": "Bonn"}}]'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (Hermes(), "Hello", "Hello", 0),
        (Hermes(), CALL, "", 1),
        (Hermes(), f"Let me see. {CALL}\n{CALL}", "Let me see.", 2),
        (Hermes(), "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        (Hermes(), f"{CALL}<tool_call>[]</tool_call>", f"{CALL}<tool_call>[]</tool_call>", 0),
        (Hermes(), CALL.removesuffix("\n</tool_call>"), "", 1),
        (Hermes(), CALL.removesuffix("call>"), "", 1),
        (Hermes(), f"{CALL[:-12]} and so on", f"{CALL[:-12]} and so on", 0),
        (Hermes(), "a < b and <tool", "a < b and <tool", 0),
        (Llama3Json(), LLAMA, "", 1),
        (Llama3Json(), f"\n<|python_tag|>{LLAMA}; {LLAMA}\n", "", 2),
        (Llama3Json(), LLAMA.replace("weather", "wetter"), LLAMA.replace("weather", "wetter"), 0),
        (Llama3Json(), f"Call {LLAMA}", f"Call {LLAMA}", 0),
        (Llama3Json(), f"{LLAMA} it is", f"{LLAMA} it is", 0),
        (Llama3Json(), '{"name": "weather"}', '{"name": "weather"}', 0),
        (Llama3Json(), "<| no", "<| no", 0),
        (Mistral(False), f"[TOOL_CALLS]{MISTRAL}", "", 1),
        (Mistral(False), f"[TOOL_CALLS] [{MISTRAL[1:-1]}, {MISTRAL[1:]}", "", 2),
        (Mistral(True), f"I see.{LATER}{LATER.replace('[ARGS]', '')}", "I see.", 2),
        (Mistral(True), '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Bonn"}', "", 1),
        (Mistral(False), MISTRAL, MISTRAL, 0),
        (Mistral(False), '[TOOL_CALLS]{"name": "weather"}', '[TOOL_CALLS]{"name": "weather"}', 0),
    ],
)  # fmt: skip
def test_calls_are_read_the_same_whole_and_in_pieces(form: ToolForm, text: str, content: str, calls: int) -> None:
    reader = ToolReader(form, ["weather"])
    shown, found = reader.read(text, cut=False)
    assert (shown, len(found)) == (content, calls)
    assert all(call["function"]["name"] == "weather" for call in found)
    assert all(json.loads(call["function"]["arguments"]) == {"city": "Bonn"} for call in found)
    for size in (1, 3, 7):
        stream = reader.stream()
        pieces = [stream.text(text[at : at + size]) for at in range(0, len(text), size)]
        rest, streamed = stream.finish(cut=False)
        assert ("".join(pieces) + rest).rstrip() == content.rstrip()
        assert [call["function"] for call in streamed] == [call["function"] for call in found]


def test_of_calls_that_were_cut_the_whole_ones_count() -> None:
    text = f"{CALL}\n{CALL[:40]}"
    assert calls_in(Hermes(), text, []) == (text, [])
    assert len(calls_in(Hermes(), text, [], cut=True)[1]) == 1
    assert calls_in(Hermes(), CALL[:40], [], cut=True) == (CALL[:40], [])


def test_one_call_where_several_were_not_wanted() -> None:
    assert len(ToolReader(Hermes(), [], many=False).read(CALL + CALL, cut=False)[1]) == 1


def test_identifiers_are_ones_that_mistral_templates_take() -> None:
    assert all(len(name) == 9 and name.isalnum() for name in (Mistral(False).new_id() for _ in range(50)))


def test_a_called_tool_ends_the_choice_as_such() -> None:
    """The tiny model writes no calls, so its words are put into its mouth: the whole way but the logits."""
    model: Any = SimpleNamespace(name="tools")
    answer = ChatAnswer(ChatBody.model_validate({**BODY, "tools": [WEATHER]}), model, ToolReader(Hermes(), ["weather"]))
    sequence = SimpleNamespace(
        index=0, text=f"Wait. {CALL}", token_ids=[1, 2], logprobs=None, finish_reason="stop", stop_reason=None
    )
    output = SimpleNamespace(prompt_token_ids=[1], outputs=[sequence], metrics=None, prompt_logprobs=None)
    choice = answer.whole([output])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}


# -- calls that are forced


def check_calls(calls: Sequence[Any]) -> None:
    """Their arguments are what the tools take."""
    assert calls
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            jsonschema.validate(arguments, CITY)
        else:
            assert (call["function"]["name"], arguments) == ('clo"ck', {})


@pytest.mark.parametrize("choice", ["required", named("weather"), named('clo"ck')], ids=["any", "weather", "clock"])
def test_a_forced_call_is_one_whatever_the_model_would_say(tool_server: Any, choice: Any) -> None:
    body = {**BODY, "tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
    [said] = tool_server.post("/v1/chat/completions", body).json()["choices"]
    assert said["finish_reason"] == "tool_calls"
    assert said["message"]["content"] is None
    [call] = said["message"]["tool_calls"]
    check_calls([call])
    assert choice == "required" or call["function"]["name"] == choice["function"]["name"]
    events = tool_server.stream("/v1/chat/completions", body)
    deltas = [each for event in events for each in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [delta["function"] for delta in deltas] == [call["function"]]
    assert tool_server.text(events) == ""


def test_several_calls_may_be_forced(tool_server: Any) -> None:
    body = {**BODY, "tools": [WEATHER], "tool_choice": "required", "n": 6, "seed": 1}
    choices = tool_server.post("/v1/chat/completions", body).json()["choices"]
    for choice in choices:
        check_calls(choice["message"]["tool_calls"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_choice": named("no_such")}, "'weather'"),
        ({"tool_choice": "required", "tools": None}, "none"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "no other format"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [UNSUPPORTED]}, "not"),
    ],
)  # fmt: skip
def test_what_cannot_be_forced_is_400(tool_server: Any, more: dict[str, Any], said: str) -> None:
    response = tool_server.post("/v1/chat/completions", {**BODY, "tools": [WEATHER], **more})
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]


def test_a_form_that_is_not_known_cannot_be_forced_unless_it_is_named(
    with_template: Callable[[str], Path], tool_template: str, serve: Callable[..., Any]
) -> None:
    path = with_template(tool_template.replace("<tool_call>", "<function_call>"))
    body = {**BODY, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    response = serve((path, "unknown")).post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]
    for parser in ("llama3_json", "mistral"):
        answer = serve((path, "unknown"), tool_call_parser=parser).post("/v1/chat/completions", body).json()
        check_calls(answer["choices"][0]["message"]["tool_calls"])


def test_the_prompt_of_a_forced_call_ends_with_its_beginning(tool_server: Any) -> None:
    body = {**BODY, "tools": [WEATHER], "tool_choice": "required", "return_token_ids": True, "seed": 3}
    ids = tool_server.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    assert tool_server.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("assistant: <tool_call>\n")


def matches(grammar: str, text: str) -> bool:
    """Whether the grammar takes this text as a whole, token by token of one byte each."""
    import llguidance

    vocabulary = _Vocabulary([bytes([byte]) for byte in range(256)])
    matcher = compile_grammar("grammar", grammar, llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary)))
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", [Hermes(), Llama3Json(), Mistral(False)], ids=lambda form: form.name)
def test_what_a_grammar_takes_is_what_is_read(form: ToolForm) -> None:
    key = "parameters" if isinstance(form, Llama3Json) else "arguments"
    one = f'{{"name": "weather", "{key}": {{"city": "Bonn", "days": 3}}}}'
    other = f'{{"name": "clo\\"ck", "{key}": {{}}}}'
    texts = {
        "hermes": (f"{one}\n</tool_call>", f"{one}\n</tool_call>\n<tool_call>\n{other}\n</tool_call>"),
        "llama3_json": (one, f"{one}; {other}"),
        "mistral": (f"[{one}]", f"[{one}, {other}]"),
    }[form.name]
    for count, text in enumerate(texts, 1):
        for many in (True, False):
            asked = form.forced(FUNCTIONS, many=many)
            assert matches(asked.grammar, text) is (many or count == 1)
            assert not matches(asked.grammar, text.replace("3", "99"))
            assert not matches(asked.grammar, text.replace("weather", "wetter"))
        content, calls = calls_in(form, asked.prefix + text, ["weather", 'clo"ck'])
        assert (content, [call.name for call in calls]) == ("", ["weather", 'clo"ck'][:count])


def test_mistral_with_arguments_after_the_name() -> None:
    form = Mistral(True)
    asked = form.forced(FUNCTIONS[:1], many=True)
    text = '{"city": "Ulm", "days": 1}'
    assert asked.prefix == "[TOOL_CALLS]weather[ARGS]"
    assert matches(asked.grammar, text)
    assert [call.name for call in calls_in(form, asked.prefix + text, [])[1]] == ["weather"]
    with pytest.raises(Exception, match="Name one"):
        form.forced(FUNCTIONS, many=True)


def test_forced_offline_the_same(tool_server: Any, offline: LLM) -> None:
    """The server adds the grammar and the beginning, and nothing else."""
    body = {**BODY, "tools": [WEATHER], "tool_choice": named("weather"), "seed": 3, "return_token_ids": True}
    answer = tool_server.post("/v1/chat/completions", body).json()
    asked = Hermes().forced(FUNCTIONS[:1], many=False)
    params = SamplingParams(temperature=1.0, max_tokens=300, seed=3, structured_outputs={"grammar": asked.grammar})
    [expected] = offline.generate({"prompt_token_ids": answer["prompt_token_ids"]}, params, use_tqdm=False)
    assert answer["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids)
