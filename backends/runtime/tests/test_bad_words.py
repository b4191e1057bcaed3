"""Bad words: the automaton says what a search through all words would, and lists are encoded once, all at once."""

from __future__ import annotations

import gc
import pickle
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelbay import LLM, SamplingParams
from modelbay.errors import UsageError
from modelbay_runtime.engine.bad_words import BadWordLists, BadWords, BadWordWatch, encode_bad_words
from modelbay_testing.tiny import tiny_checkpoint


def completing(words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """By the definition: the last tokens of the words of which all but that stand at the end of the output."""
    return {word[-1] for word in words if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) if word}


@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_the_automaton_forbids_what_a_search_through_all_words_would(tokens: int) -> None:
    draw = random.Random(tokens)
    for _ in range(60):
        count = draw.randint(0, 12)
        words = [[draw.randrange(tokens) for _ in range(draw.randint(1, 6))] for _ in range(count)]
        output: list[int] = []
        automaton = BadWords([*words, []])
        watch = BadWordWatch(automaton, output)
        for step in range(60):
            # Not asked at every step: a token may have come while the sequence was not sampled.
            if step % 3 != 1:
                expected = completing([word for word in words if len(word) <= len(output) + 1], output)
                assert set(watch.forbidden().tolist()) == expected, (words, output)
            output.append(draw.randrange(tokens))
        assert np.array_equal(pickle.loads(pickle.dumps(watch)).forbidden(), watch.forbidden())


def test_words_are_spelt_with_and_without_a_space_and_none_twice() -> None:
    def letters(texts: list[str]) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]

    assert encode_bad_words(["ab"], letters) == [(97, 98), (32, 97, 98)]
    assert encode_bad_words([" a"], letters) == [(32, 97)]
    assert encode_bad_words(["a", " a", "a"], letters) == [(97,), (32, 97)]
    assert encode_bad_words(["a", "b"], lambda texts: [[7] if "a" in text else [] for text in texts]) == [(7,)]


class Counting:
    """A tokenizer of letters that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, texts: list[str], **kwargs: Any) -> dict[str, list[list[int]]]:
        assert kwargs["add_special_tokens"] is False
        self.asked.append(texts)
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def test_a_list_is_encoded_once_for_as_long_as_it_is_in_use() -> None:
    tokenizer = Counting()
    lists = BadWordLists(tokenizer, 128)
    assert lists.automaton(()) is None
    first = lists.automaton(("a", "b"))
    assert lists.automaton(["a", "b"]) is first
    assert [len(texts) for texts in tokenizer.asked] == [4]
    del first
    gc.collect()
    assert lists.automaton(("a", "b")) is not None
    assert len(tokenizer.asked) == 2
    with pytest.raises(UsageError, match="bad_words needs a tokenizer"):
        BadWordLists(None, 128).automaton(("a",))


def test_a_word_with_a_token_that_the_model_has_not_is_none() -> None:
    words = BadWordLists(Counting(), 98).automaton(("ab", "a"))
    assert words is not None
    assert words.completing(0).tolist() == [97]
    assert words.completing(words.follow(0, 97)).tolist() == [97]  # not "b", which is beyond


def test_several_threads_may_ask() -> None:
    lists, found = BadWordLists(Counting(), 128), []
    threads = [threading.Thread(target=lambda: found.append(lists.automaton(("a", "b")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert None not in found


def test_n_sequences_of_several_prompts_encode_their_bad_words_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes nothing for anybody while it encodes."""
    with LLM(str(tiny_checkpoint(tmp_path, "llama")), dtype="float32", device="cpu") as llm:
        lists, asked = llm.engine.bad_words, list[int]()
        encode = lists._encode

        def counted(texts: list[str]) -> list[list[int]]:
            asked.append(len(texts))
            return encode(texts)

        monkeypatch.setattr(lists, "_encode", counted)
        words = [f"word {number}" for number in range(50)]
        params = SamplingParams(n=8, seed=1, max_tokens=3, bad_words=words)
        outputs = llm.generate(["The quick", "brown"], params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [8, 8]
    assert asked == [100]
