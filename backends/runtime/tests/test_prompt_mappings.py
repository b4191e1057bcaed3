"""What stands for a prompt: nothing of a mapping is dropped in silence, and integers of any library are token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelbay import LLM, PoolingParams, SamplingParams
from modelbay.errors import UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
IDS = [1, 5, 9, 40]


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(checkpoint("llama"))) as opened:
        yield opened


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            {"prompt": "<image> what", "multi_modal_datas": {"image": b""}},
            "has 'multi_modal_datas', which is not known.*Did you mean 'multi_modal_data'",
        ),
        ({"prompt": "a", "foo": 1}, "has 'foo', which is not known.*Known: prompt, prompt_token_ids, multi_modal_data"),
        ({"prompt": "a", 5: 1}, "has '5', which is not known"),
        ({"prompt_token_ids": IDS, "promt": "a"}, "has 'promt', which is not known.*Did you mean 'prompt'"),
        ({"prompt": "a", "cache_salt": "s"}, "has 'cache_salt', which is not served.*enable_prefix_caching=False"),
        ({"prompt": "a", "token_type_ids": [0]}, "has 'token_type_ids', which is not served"),
        ({"prompt_embeds": torch.zeros(1, 4)}, "has 'prompt_embeds', which is not served"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "has 'encoder_prompt', which is not served"),
        ({"prompt": "a", "decoder_prompt": "b"}, "has 'decoder_prompt', which is not served"),
        ({"prompt": "a", "type": "embeds"}, "has the type 'embeds'; served are 'text' with prompt and 'token' with"),
        ({"prompt": "a", "type": "token"}, "has the type 'token'"),
        ({"prompt": "a", "type": ["text"]}, "has the type"),
        ({"role": "user", "content": "a"}, "got role, content.*Use chat for conversations"),
    ],
)
def test_every_key_of_a_prompt_has_a_meaning_or_is_refused_by_name(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        llm.generate(prompt, GREEDY)
    caught.match(f"(?s)^a prompt mapping .*{message}")
    with pytest.raises(UsageError, match=r"^prompt 1: a prompt mapping "):
        llm.generate(["b", prompt], GREEDY)
    with pytest.raises(UsageError, match=r"a prompt mapping "):
        next(llm.stream(prompt, GREEDY))
    with pytest.raises(UsageError, match=r"a prompt mapping "):
        llm.encode(prompt, PoolingParams(truncate_prompt_tokens=-1))


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": IDS, "type": "token"},
        {"prompt_token_ids": IDS, "prompt": None, "multi_modal_data": None, "cache_salt": None, "foo": None},
        {"prompt_token_ids": tuple(IDS)},
        {"prompt_token_ids": [np.int64(token_id) for token_id in IDS]},
        {"prompt_token_ids": np.array(IDS, dtype=np.uint8)},
        {"prompt_token_ids": torch.tensor(IDS)},
        np.array(IDS),
        torch.tensor(IDS),
        [np.array(IDS)],
        [np.int32(token_id) for token_id in IDS],
    ],
)
def test_integers_of_any_library_are_token_ids(llm: LLM, prompt: Any) -> None:
    [expected] = llm.generate(IDS, GREEDY)
    [output] = llm.generate(prompt, GREEDY)
    assert output.prompt_token_ids == IDS
    assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    [hidden] = llm.encode(prompt)
    assert hidden.prompt_token_ids == IDS


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [1, True]}, "token ids must be integers, got True at position 1"),
        ([True, False], "a prompt is a string or a list of token ids, got bool"),
        ({"prompt_token_ids": [1, "a"]}, "a string or a list of token ids, got 'a' at position 1"),
        (np.array([[1, 2], [3, 4]]), r"have one dimension, got an array of 2.*one prompt for each row"),
        ({"prompt_token_ids": np.array(5)}, "have one dimension, got an array of 0"),
        ({"prompt_token_ids": np.array([1.0])}, r"a list of token ids, got 1\.0 at position 0"),
        (torch.tensor([True]), "token ids must be integers, got True at position 0"),
        ({"prompt_token_ids": b"ab"}, "a list of token ids, got bytes"),
        ({"prompt_token_ids": np.array([1, 999])}, "token id 999 at position 1 is outside"),
    ],
)
def test_what_is_no_list_of_integers_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        llm.generate(prompt, GREEDY)
    caught.match(f"(?s){message}")


def test_numbers_of_numpy_in_parameters_are_pythons_own(llm: LLM) -> None:
    plain = SamplingParams(
        seed=3, n=2, max_tokens=4, min_tokens=1, top_k=20, logprobs=1, prompt_logprobs=0, temperature=0.5, top_p=0.75,
        min_p=0.125, truncate_prompt_tokens=3, repetition_penalty=1.25, stop_token_ids=[7], logit_bias={5: 0.5},
    )  # fmt: skip
    given = {name: getattr(plain, name) for name in plain.explicit}
    numpy = {
        name: np.int64(v) if isinstance(v, int) else np.float32(v)
        for name, v in given.items()
        if isinstance(v, int | float)
    }
    same = SamplingParams(
        **{**given, **numpy, "stop_token_ids": np.array([7]), "logit_bias": {np.int64(5): np.float32(0.5)}}
    )
    assert same == plain
    assert all(type(getattr(same, name)) in (int, float) for name in numpy)
    outputs = [llm.generate(IDS, params)[0] for params in (plain, same)]
    assert [each.token_ids for each in outputs[0].outputs] == [each.token_ids for each in outputs[1].outputs]
    pooled = PoolingParams(dimensions=np.int64(4), truncate_prompt_tokens=np.int32(-1))
    assert pooled == PoolingParams(dimensions=4, truncate_prompt_tokens=-1)
    assert type(pooled.dimensions) is int
    assert SamplingParams(seed=np.int64(-1)).seed is None


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p"])
@pytest.mark.parametrize(
    "value", [10**400, np.float64("nan"), np.float32("inf"), np.bool_(True)], ids=["huge", "nan", "inf", "bool"]
)
def test_numbers_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} must be"):
        SamplingParams(**{name: value})
