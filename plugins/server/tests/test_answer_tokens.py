"""Tokens in answers: none is lost in a stream, and each says its own bytes and its place in the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from modelbay_runtime.engine.detokenizer import Detokenizer
from modelbay_server.answers.offsets import Offsets

EMOJI = "🐉🐉 abc déf — 한국어\n"
CALL = '<tool_call>{"name": "f", "arguments": {"x": "🐉"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def choices_of(events: Sequence[Any], index: int) -> list[Any]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def joined(choices: Sequence[Any], name: str) -> list[Any]:
    return [item for choice in choices for item in choice.get(name) or ()]


# -- ids in a stream


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": 1}, {"echo": True}, {"stop": ["e", "a"]}, {"n": 3}, {"max_tokens": 0, "echo": True},
     {"structured_outputs": {"choice": [EMOJI]}}, {"skip_special_tokens": False}],
    ids=str,
)  # fmt: skip
def test_streamed_ids_are_those_of_the_whole_answer(byte_server: Any, more: dict[str, Any]) -> None:
    for seed in range(3):
        body = {"prompt": EMOJI, "max_tokens": 24, "seed": seed, "return_token_ids": True, **more}
        whole = byte_server.post("/v1/completions", body).json()["choices"]
        events = byte_server.stream("/v1/completions", body)
        for choice in whole:
            pieces = choices_of(events, choice["index"])
            assert joined(pieces, "token_ids") == choice["token_ids"]
            assert joined(pieces, "prompt_token_ids") == choice["prompt_token_ids"]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": True}, {"stop": ["e", "a"]}, {"n": 3}, {"tools": TOOLS}, {"tools": TOOLS, "logprobs": True},
     {"tools": TOOLS, "structured_outputs": {"choice": [f"🐉 <tool_x {CALL}"]}, "max_tokens": 120},
     {"tools": TOOLS, "tool_choice": "required"}],
    ids=str,
)  # fmt: skip
def test_streamed_ids_of_chats_are_those_of_the_whole_answer(byte_server: Any, more: dict[str, Any]) -> None:
    for seed in range(3):
        messages = [{"role": "user", "content": EMOJI}]
        body = {"messages": messages, "max_tokens": 40, "seed": seed, "return_token_ids": True, **more}
        whole = byte_server.post("/v1/chat/completions", body).json()
        events = byte_server.stream("/v1/chat/completions", body)
        for choice in whole["choices"]:
            pieces = choices_of(events, choice["index"])
            assert joined(pieces, "token_ids") == choice["token_ids"]
            assert joined(pieces, "prompt_token_ids") == whole["prompt_token_ids"]
            shown = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
            assert joined(shown, "content") == (choice["logprobs"] or {"content": []})["content"]
            said = choice["message"]["content"] or ""
            text = byte_server.text(events, choice["index"])
            # The space before a call has gone out when the call comes.
            assert (text.rstrip() if "tool_calls" in choice["message"] else text) == said


# -- places in the text


def places(data: bytes) -> list[int]:
    """For each byte the number of characters before the one that it is a part of, broken ones being replaced."""
    found: list[int] = []
    number = 0
    while len(found) < len(data):
        rest = data[len(found) :]
        size = next((size for size in range(1, 5) if decodes(rest[:size])), 0)
        if not size:
            try:
                rest.decode()
            except UnicodeDecodeError as error:
                size = error.end
        found += [number] * size
        number += 1
    return found


def decodes(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def test_places_of_bytes() -> None:
    assert places("a🐉é".encode()) == [0, 1, 1, 1, 1, 2, 2]
    assert places(b"\xe2\x82A\x80\xf0\x9f") == [0, 0, 1, 2, 3, 3]


def expected_offsets(ids: Sequence[int], detokenizer: Detokenizer, skip: Sequence[int] = ()) -> list[int]:
    pieces = [b"" if token in skip else detokenizer.own_bytes(token) or b"" for token in ids]
    at = [*places(b"".join(pieces)), len(b"".join(pieces).decode(errors="replace"))]
    return [at[len(b"".join(pieces[:number]))] for number in range(len(ids))]


def test_text_offsets_of_whole_and_streamed_answers(byte_server: Any, byte_checkpoint: Path) -> None:
    detokenizer = Detokenizer(AutoTokenizer.from_pretrained(byte_checkpoint))
    drawn = 0
    for seed in range(6):
        no_end = {str(token): -100 for token in range(3)}
        body = {"prompt": "x", "max_tokens": 30, "seed": seed, "logprobs": 2, "return_token_ids": True,
                "logit_bias": no_end}  # fmt: skip
        [choice] = byte_server.post("/v1/completions", body).json()["choices"]
        expected = expected_offsets(choice["token_ids"], detokenizer)
        assert choice["logprobs"]["text_offset"] == expected
        pieces = choices_of(byte_server.stream("/v1/completions", body), 0)
        assert [at for piece in pieces if piece["logprobs"] for at in piece["logprobs"]["text_offset"]] == expected
        drawn += choice["text"].count("\ufffd")
    assert drawn > 5, "the model said no parts of characters"


def test_text_offsets_where_the_prompt_is_echoed(byte_server: Any) -> None:
    """The tokenizer puts a BOS before it, which the text does not have."""
    choice_text = "é🐉 end"
    body = {"prompt": EMOJI, "echo": True, "max_tokens": 30, "logprobs": 0, "return_token_ids": True, "seed": 1,
            "structured_outputs": {"choice": [choice_text]}}  # fmt: skip
    [choice] = byte_server.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == EMOJI + choice_text
    offsets, prompt = choice["logprobs"]["text_offset"], len(choice["prompt_token_ids"])
    tokens = choice["logprobs"]["tokens"]
    assert offsets[:2] == [0, 0]
    assert offsets[prompt] == len(EMOJI)
    for token, at in zip(tokens[1:], offsets[1:], strict=True):
        assert "\ufffd" in token or choice["text"].startswith(token, at) or at == len(choice["text"])
    assert [offsets[number] for number, token in enumerate(tokens) if token == "b"] == [choice["text"].index("b")]
    pieces = choices_of(byte_server.stream("/v1/completions", body), 0)
    assert [at for piece in pieces if piece["logprobs"] for at in piece["logprobs"]["text_offset"]] == offsets


def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece's way: a token for each byte, and the first space of a text is stripped."""
    words = ["▁", "▁a", "b", "ö", "</s>"]
    vocab = {token: place for place, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def ids_of(data: bytes) -> list[int]:
    return [byte + 1 for byte in data]


SPACE_A, B, END = 258, 259, 261


@pytest.mark.parametrize(
    ("prompt", "text", "output", "expected"),
    [
        ([], "", [*ids_of("🐉🐉".encode()), SPACE_A, B], [0, 0, 0, 0, 1, 1, 1, 1, 2, 4]),
        # A run with one wrong byte is as many replacement characters as it has bytes.
        ([], "", [B, *ids_of(b"\xf0\x9f"), B], [0, 1, 1, 3]),
        ([], "", [*ids_of(b"\xc3\xa9\xff"), SPACE_A, B], [0, 0, 1, 3, 5]),
        ([SPACE_A, B], "ab", [SPACE_A, B], [0, 1, 2, 4]),
        ([END, SPACE_A, B], "ab", [END, B, END, B], [0, 0, 1, 2, 2, 3, 3]),
    ],
)
def test_text_offsets_with_byte_fallback(prompt: list[int], text: str, output: list[int], expected: list[int]) -> None:
    tokenizer = byte_fallback()
    offsets = Offsets(Detokenizer(tokenizer), tokenizer.all_special_ids, skip_special=True)
    assert [*offsets.of_prompt(prompt, text), *offsets.of_output(output)] == expected
    if text:
        shown = tokenizer.decode(prompt, skip_special_tokens=True)
        assert shown == text


# -- bytes


def test_chat_logprobs_have_the_bytes_of_parts_of_characters(byte_server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "logprobs": True, "top_logprobs": 3,
            "structured_outputs": {"choice": [EMOJI]}}  # fmt: skip
    choice = byte_server.post("/v1/chat/completions", body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert sum("\ufffd" in token["token"] for token in content) > 8
    spelt = b"".join(bytes(token["bytes"]) for token in content)
    assert spelt.removesuffix(b"</s>") == EMOJI.encode()
    for token in content:
        for entry in (token, *token["top_logprobs"]):
            assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]


def test_bytes_that_a_tokenizer_does_not_tell_are_null() -> None:
    vocab = {token: number for number, token in enumerate(["<unk>", "x", "y"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Replace("y", "\ufffd")
    detokenizer = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert [detokenizer.own_bytes(token) is None for token in (1, 2)] == [False, True]


# -- usage


@pytest.mark.parametrize("n", [1, 3])
def test_running_usage_of_an_echo_counts_no_output(server: Any, n: int) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["x", "y z"], "max_tokens": 0, "echo": True, "n": n, "stream_options": both}
    events = server.stream("/v1/completions", body)
    assert {event["usage"]["completion_tokens"] for event in events} == {0}


def test_running_usage_grows_to_the_last(server: Any) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    for path, given in (
        ("/v1/completions", {"prompt": ["x", "y z"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
    ):
        events = server.stream(path, {**given, "max_tokens": 5, "ignore_eos": True, "stream_options": both})
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert json.dumps(events[-1]["choices"]) == "[]"
        assert counts[-1] == counts[-2] == 10 * (2 if "prompt" in given else 1)
