"""T2: a text of megabytes is refused, or cut, without encoding all of it, whichever way it comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelbay import LLM, PoolingParams, SamplingParams
from modelbay.errors import UsageError
from modelbay.tokenizer.cached import CachedTokenizer
from modelbay_testing import assets

LONG = "one two three, four. " * 200_000
TEXT = LONG[:200_000]  # where the whole is encoded too, to compare
SHORT = SamplingParams(max_tokens=2, temperature=0.0)


@pytest.fixture
def encoded_characters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every text that a tokenizer was given."""
    found: list[int] = []
    original = CachedTokenizer._encode_plus

    def counted(self: Any, text: Any, text_pair: Any = None, **kwargs: Any) -> Any:
        texts = [text, text_pair or ""]  # each perhaps a batch of one
        found.append(sum(len(each if isinstance(each, str) else "".join(each)) for each in texts))
        return original(self, text, text_pair, **kwargs)

    monkeypatch.setattr(CachedTokenizer, "_encode_plus", counted)
    return found


def test_t2_generate_chat_and_stream(open_llm: Callable[..., LLM], encoded_characters: list[int]) -> None:
    llm = open_llm("llama", max_model_len=64)
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(LONG, SHORT, use_tqdm=False),
        lambda: llm.generate([{"prompt": "a"}, {"prompt": LONG}], None, use_tqdm=False),
        lambda: llm.generate(LONG, SamplingParams(truncate_prompt_tokens=100), use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": LONG}], SHORT, use_tqdm=False),
        lambda: list(llm.stream(LONG, SHORT)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="more than 63 tokens; with max_model_len=64 at most 63 leave room"):
            call()
    assert sum(encoded_characters) < 300_000
    with pytest.raises(UsageError, match=r"the prompt has \d+ tokens; with max_model_len=64"):
        llm.generate("one two " * 100, SHORT, use_tqdm=False)


def test_t2_generate_cut_to_the_last_tokens(open_llm: Callable[..., LLM], encoded_characters: list[int]) -> None:
    llm = open_llm("llama", max_model_len=64)
    for keep in (-1, 7):
        params = SamplingParams(max_tokens=1, temperature=0.0, truncate_prompt_tokens=keep)
        before = sum(encoded_characters)
        [output] = llm.generate(TEXT, params, use_tqdm=False)
        assert sum(encoded_characters) - before < 100_000
        whole = llm.get_tokenizer()(TEXT)["input_ids"]
        assert output.prompt_token_ids == whole[-(63 if keep == -1 else keep) :]


def test_t2_embed_and_score(encoded_characters: list[int]) -> None:
    with LLM(str(assets.minilm_dir()), dtype="float32") as llm:
        tokenizer = llm.get_tokenizer()
        for call in (
            lambda: llm.embed(LONG, use_tqdm=False),
            lambda: llm.embed({"prompt": LONG}, use_tqdm=False),
            lambda: llm.encode(LONG, use_tqdm=False),
            lambda: llm.score("a query", LONG, use_tqdm=False),
        ):
            with pytest.raises(UsageError, match="more than 256 tokens; with max_model_len=256 at most 256 are served"):
                call()
        for params in (PoolingParams(truncate_prompt_tokens=5), PoolingParams(truncate_prompt_tokens=-1)):
            for given in (LONG, {"prompt": LONG}):
                [output] = llm.embed(given, params, use_tqdm=False)
                length = 5 if params.truncate_prompt_tokens == 5 else 256
                cut = tokenizer(LONG[:100_000], truncation=True, max_length=length)["input_ids"]
                assert output.prompt_token_ids == cut
                encoded_characters.remove(100_000)
        assert sum(encoded_characters) < 600_000


@pytest.mark.parametrize("length", [20, 21])
def test_t2_a_pair_for_a_cross_encoder(length: int, encoded_characters: list[int]) -> None:
    from transformers import AutoTokenizer

    from modelbay.tokenizer import cached
    from modelbay_runtime.pooling.inputs import read_pair

    tokenizer = cached(AutoTokenizer.from_pretrained(assets.minilm_dir()))
    vocab = len(tokenizer)
    for pair in (("a query", TEXT), (TEXT, "a query " * 7), ("two words " * 20, TEXT)):
        cut = read_pair(*pair, tokenizer, vocab, PoolingParams(truncate_prompt_tokens=length), 512, num_types=2)
        assert sum(encoded_characters) < 5 * len(TEXT) // 4, (
            "once whole where both are longer, and an odd token is left"
        )
        encoded_characters.clear()
        assert cut.token_ids == tokenizer(*pair, truncation="longest_first", max_length=length)["input_ids"]
        encoded_characters.clear()
        with pytest.raises(UsageError, match="the prompt has more than 512 tokens"):
            read_pair(*pair, tokenizer, vocab, PoolingParams(), 512, num_types=2)
        assert sum(encoded_characters) < 100_000
        encoded_characters.clear()
