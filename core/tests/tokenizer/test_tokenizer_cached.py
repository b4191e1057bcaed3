"""T2, T3: the cached wrapper: same types and values as Transformers', picklable, current, and safe from threads."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelbay.errors import UsageError
from modelbay.tokenizer import cached, check_token_ids, stop_token_ids
from modelbay_testing import assets


@pytest.fixture
def pair(tiny: Path) -> tuple[Any, Any]:
    """The cached tokenizer and Transformers' own."""
    from transformers import AutoTokenizer

    return cached(AutoTokenizer.from_pretrained(tiny)), AutoTokenizer.from_pretrained(tiny)


def test_t2_same_values_and_types(pair) -> None:
    """Case 25."""
    ours, theirs = pair
    for name in ("all_special_ids", "all_special_tokens", "vocab", "vocab_size", "eos_token_id", "special_tokens_map"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert type(getattr(ours, name)) is type(getattr(theirs, name))
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.max_token_id == max(theirs.get_vocab().values())
    assert len(ours.longest_token) == max(map(len, theirs.get_vocab()))
    assert isinstance(ours, type(theirs))
    assert type(ours).__name__ == type(theirs).__name__
    assert bool(ours)


def test_t2_computed_once(pair, monkeypatch) -> None:
    """Case 25."""
    ours, theirs = pair
    calls = []
    original = type(theirs).get_vocab
    monkeypatch.setattr(type(theirs), "get_vocab", lambda self: calls.append(1) or original(self))
    for _ in range(5):
        ours.get_vocab()
        _ = ours.max_token_id, ours.longest_token, len(ours)
    assert len(calls) == 1


def test_t2_what_a_caller_does_with_the_answer_changes_nothing(pair) -> None:
    ours, theirs = pair
    ours.get_vocab().clear()
    ours.all_special_ids.append(99)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.all_special_ids == theirs.all_special_ids


def test_t2_invalidated_by_new_tokens(pair) -> None:
    ours, theirs = pair
    for tokenizer in (ours, theirs):
        _ = len(tokenizer), tokenizer.all_special_ids, tokenizer.get_vocab()
        assert tokenizer.add_tokens(["zebra"]) == 1
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
        tokenizer.unk_token = "<tool>"
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert len(ours) == len(theirs)
    text = "the zebra<tool>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert (
        ours(text, truncation=True, max_length=3)["input_ids"]
        == theirs(text, truncation=True, max_length=3)["input_ids"]
    )


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy"])
def test_t2_copies(pair, how) -> None:
    """Case 25."""
    ours, theirs = pair
    _ = ours("the dog", truncation=True, max_length=2), len(ours)
    again = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy}[how](ours)
    assert type(again) is type(ours)
    assert again("the dog")["input_ids"] == theirs("the dog")["input_ids"]
    assert again.all_special_ids == theirs.all_special_ids
    assert cached(again) is again


def test_t2_save_pretrained_gives_back_the_same_tokenizer(pair, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = pair
    ours.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("the quick dog")["input_ids"] == theirs("the quick dog")["input_ids"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_t2_settings_per_call_equal_transformers(pair, side) -> None:
    ours, theirs = pair
    texts = ["the quick brown fox", "a dog", ""]
    for tokenizer in pair:
        tokenizer.truncation_side = tokenizer.padding_side = side
    for kwargs in (
        {"truncation": True, "max_length": 3},
        {"padding": True},
        {"padding": "max_length", "max_length": 12, "truncation": True},
        {"truncation": True, "max_length": 4, "stride": 1, "return_overflowing_tokens": True},
        {"split_special_tokens": True},
        {},
    ):
        assert ours(texts, **kwargs)["input_ids"] == theirs(texts, **kwargs)["input_ids"], kwargs
    assert (
        ours("<s>the", split_special_tokens=True)["input_ids"]
        == theirs("<s>the", split_special_tokens=True)["input_ids"]
    )
    assert ours("<s>the")["input_ids"] == theirs("<s>the", split_special_tokens=False)["input_ids"]


def hammer(tokenizer: Any, reference: Any) -> None:
    """50 threads mix encode, with and without truncation and padding, with decode; ids as from one thread."""
    rng = random.Random(0)
    words = ["the", "quick", "brown", "fox", "layers", "of", "text", "1234", "Ünïcödé"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(40)]
    plain = {text: reference(text)["input_ids"] for text in texts}
    cut = {text: reference(text, truncation=True, max_length=5)["input_ids"] for text in texts}
    padded = {text: reference(text, padding="max_length", max_length=80)["input_ids"] for text in texts}
    decoded = {text: reference.decode(plain[text]) for text in texts}

    def work(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(30):
            text = own.choice(texts)
            match own.randrange(4):
                case 0:
                    assert tokenizer(text)["input_ids"] == plain[text]
                case 1:
                    assert tokenizer(text, truncation=True, max_length=5)["input_ids"] == cut[text]
                case 2:
                    assert tokenizer(text, padding="max_length", max_length=80)["input_ids"] == padded[text]
                case _:
                    assert tokenizer.decode(plain[text]) == decoded[text]

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(work, range(50)))


def test_t2_fifty_threads(pair) -> None:
    """Case 23."""
    hammer(*pair)


@pytest.mark.real
def test_t2_fastokens_threads_pickle_and_new_tokens(load) -> None:
    folder = assets.or_skip(assets.smollm2_dir)
    fast, plain = load(folder, tokenizer_mode="fastokens")[0], load(folder)[0]
    hammer(fast, plain)
    for tokenizer in (fast, plain):
        tokenizer.add_tokens(["zebra-crossing"])
    again = pickle.loads(pickle.dumps(fast))
    text = "a zebra-crossing here"
    for tokenizer in (fast, again):
        assert tokenizer(text)["input_ids"] == plain(text)["input_ids"]
        assert tokenizer.tokenize(text) == plain.tokenize(text)
        assert len(tokenizer) == len(plain)


# -- T3


def test_t3_ids_up_to_the_models_vocabulary_are_legal() -> None:
    """Case 24."""
    check_token_ids([0, 151860, 151935], 151936)
    check_token_ids([], 10)


@pytest.mark.parametrize("bad", [151936, -1, 2**40])
def test_t3_ids_beyond_are_a_usage_error(bad) -> None:
    """Case 24."""
    with pytest.raises(UsageError, match=f"token id {bad} at position 1 .*0 to 151935"):
        check_token_ids([5, bad], 151936)


@pytest.mark.parametrize("bad", ["5", 1.0, None, True])
def test_t3_not_an_id(bad) -> None:
    with pytest.raises(UsageError, match="must be integers"):
        check_token_ids([bad], 10)


def test_t3_numpy_ids_are_ids() -> None:
    import numpy

    check_token_ids(numpy.array([1, 2]), 3)


def test_t3_an_undecodable_id_is_empty_text(pair) -> None:
    ours, _ = pair
    assert len(ours) < 255
    assert ours.decode([255]) == ""
    ids = ours("the dog")["input_ids"]
    assert ours.decode([*ids[:2], 255, *ids[2:]]) == ours.decode(ids)


def test_t3_tokenizer_larger_than_the_model_is_a_warning(load, tiny) -> None:
    assert not load(tiny, vocab_size=256)[1].warnings()
    assert load(tiny, vocab_size=100)[1].warnings()[0].question == "ids beyond the model's vocabulary"


def test_c10_stop_ids_are_a_union(pair) -> None:
    """Case 22."""
    config: Any = SimpleNamespace(eos_token_ids=(7, 2))
    assert stop_token_ids(config, pair[0]) == (7, 2)
    assert stop_token_ids(SimpleNamespace(eos_token_ids=(9,)), pair[0]) == (9, 2)  # type: ignore[arg-type]
