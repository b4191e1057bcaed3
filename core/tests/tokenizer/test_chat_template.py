"""T4: chat templates, and exactly one BOS whichever way the prompt came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelbay.errors import TokenizerError, UsageError
from modelbay.tokenizer import encode_prompt, render_chat
from modelbay_testing import assets
from modelbay_testing.tiny import CHAT_TEMPLATE, tiny_tokenizer

CHAT = [
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "a fox"},
    {"role": "user", "content": "why"},
]
NO_BOS = CHAT_TEMPLATE.replace("{{ bos_token }}", "")
TWO_BOS = "{{ bos_token }}" + CHAT_TEMPLATE
BOS = 1


@pytest.fixture
def make(load, tmp_path: Path):
    def run(**kwargs):
        config_template = kwargs.pop("config_template", None)
        folder = tiny_tokenizer(tmp_path / "made", **kwargs)
        if config_template is not None:
            values = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps(values | {"chat_template": config_template}))
        return load(folder)[0]

    return run


def test_t4_equals_transformers(make) -> None:
    tokenizer = make()
    for prompt in (True, False):
        theirs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=True, return_dict=True)
        assert render_chat(tokenizer, CHAT, add_generation_prompt=prompt) == theirs["input_ids"]
    text = render_chat(tokenizer, CHAT, tokenize=False)
    assert text == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text.endswith("assistant: ")


@pytest.mark.real
def test_t4_real_template(load) -> None:
    tokenizer, _ = load(assets.or_skip(assets.smollm2_dir))
    text = render_chat(tokenizer, CHAT[:1], tokenize=False)
    assert text.endswith("<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n")
    ids = render_chat(tokenizer, CHAT[:1])
    assert tokenizer.decode(ids) == text
    assert encode_prompt(tokenizer, text) == ids


@pytest.mark.real
def test_t4_tools_reach_the_template(load) -> None:
    tokenizer, _ = load(assets.or_skip(assets.qwen3_tokenizer_dir))
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": parameters}}
    assert "look_up" in render_chat(tokenizer, CHAT[:1], tools=[tool], tokenize=False)
    assert "<think>\n\n</think>" in render_chat(tokenizer, CHAT[:1], tokenize=False, enable_thinking=False)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, NO_BOS, TWO_BOS])
@pytest.mark.parametrize("add_bos", [True, False])
def test_t4_one_bos_whichever_way(make, template, add_bos) -> None:
    tokenizer = make(chat_template=template, add_bos=add_bos)
    chat = render_chat(tokenizer, CHAT)
    as_text = encode_prompt(tokenizer, render_chat(tokenizer, CHAT, tokenize=False))
    completion = encode_prompt(tokenizer, "the dog")
    with_bos = encode_prompt(tokenizer, "<s>the dog")
    if add_bos:
        assert [ids.count(BOS) for ids in (chat, as_text, completion, with_bos)] == [1, 1, 1, 1]
        assert all(ids[0] == BOS for ids in (chat, as_text, completion, with_bos))
        assert completion == with_bos
    else:  # a tokenizer that adds none leaves it to the text
        assert chat.count(BOS) == template.count("bos_token")
        assert completion.count(BOS) == 0
        assert with_bos.count(BOS) == 1
    assert chat == as_text


def test_t4_a_bos_inside_the_text_stays(make) -> None:
    ids = encode_prompt(make(), "the<s>dog")
    assert [position for position, token in enumerate(ids) if token == BOS] == [0, ids.index(BOS, 1)]


def test_t4_precedence(make, tmp_path: Path) -> None:
    """Case 26."""
    both = make(chat_template="jinja {{ messages[0].content }}", config_template="config {{ messages[0].content }}")
    assert render_chat(both, CHAT, tokenize=False) == "jinja the dog"
    assert render_chat(both, CHAT, "argument {{ messages[0].content }}", tokenize=False) == "argument the dog"
    file = tmp_path / "own.jinja"
    file.write_text("file {{ messages[0].content }}")
    assert render_chat(both, CHAT, str(file), tokenize=False) == "file the dog"


def test_t4_template_of_the_config(make) -> None:
    """Case 26."""
    only = make(chat_template=None, config_template="config {{ messages[0].content }}")
    assert render_chat(only, CHAT, tokenize=False) == "config the dog"


def test_t4_none_chat_says_so_and_completion_works(make) -> None:
    """Case 26."""
    tokenizer = make(chat_template=None)
    with pytest.raises(TokenizerError, match=r"no chat template.*chat_template="):
        render_chat(tokenizer, CHAT)
    assert encode_prompt(tokenizer, "the dog")[0] == BOS
    assert render_chat(tokenizer, CHAT, CHAT_TEMPLATE)[0] == BOS


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[0].content.nothing.here }}", "nothing"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.__class__.__mro__ }}", "unsafe|__mro__"),
    ],
)
def test_t4_template_errors_are_one_line(make, template, says) -> None:
    with pytest.raises(TokenizerError, match=says) as caught:
        render_chat(make(), CHAT, template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [[], "hi", [{"content": "x"}], ["hi"], None])
def test_t4_bad_messages(make, messages) -> None:
    with pytest.raises(UsageError, match="message"):
        render_chat(make(), messages)


def test_t4_unknown_template_name(make) -> None:
    with pytest.raises(UsageError, match="neither a template nor a file"):
        render_chat(make(), CHAT, "nowhere.jinja")


def test_t4_continue_the_final_message(make) -> None:
    text = render_chat(make(), CHAT[:2], continue_final_message=True, tokenize=False)
    assert text.endswith("a fox")
