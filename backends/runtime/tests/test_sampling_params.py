"""What a request may ask for (BEHAVIOUR C10, T3; one line for each value that makes no sense)."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys

import pytest

from modelbay.errors import ConfigError, UsageError
from modelbay_runtime.sampling_params import PoolingParams, SamplingParams

NAN = math.nan


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert params.stop_strings == ()
    assert params.detokenize
    assert params.skip_special_tokens
    assert not params.greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", -1), ("n", 1.5), ("n", True),
        ("temperature", -0.1), ("temperature", NAN), ("temperature", math.inf), ("temperature", "hot"),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -0.5), ("top_p", NAN), ("top_p", True),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN),
        ("top_k", -2), ("top_k", 1.5),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", NAN),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 2.5), ("min_tokens", -1),
        ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 7), ("stop_token_ids", [-1]), ("stop_token_ids", 3),
        ("bad_words", [""]), ("seed", 2**64), ("seed", 0.5), ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2), ("logit_bias", {3: 101}), ("logit_bias", {-1: 1}), ("logit_bias", {"x": 1}),
        ("logit_bias", {3: NAN}), ("logit_bias", [1]), ("ignore_eos", "yes"), ("detokenize", 1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_one_line_that_names_it(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert "got" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("top_p", 1), ("top_k", -1), ("min_p", 1.0), ("max_tokens", None), ("logprobs", 0),
        ("logprobs", 20), ("seed", -5), ("seed", 2**64 - 1), ("truncate_prompt_tokens", -1), ("stop", ["a", "b"]),
        ("repetition_penalty", 0.5),
    ],
)  # fmt: skip
def test_values_at_the_edge_are_accepted(name: str, value: object) -> None:
    SamplingParams(**{name: value})


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="n must be 1 when sampling is greedy"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(UsageError, match=r"min_tokens \(20\).*max_tokens \(10\)"):
        SamplingParams(min_tokens=20, max_tokens=10)
    with pytest.raises(UsageError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'temprature'.*Did you mean 'temperature'"):
        SamplingParams(temprature=1)
    with pytest.raises(UsageError, match="'explicit'"):
        SamplingParams(explicit=())
    with pytest.raises(UsageError, match=r"'normalise'.*'normalize'"):
        PoolingParams(normalise=True)


def test_greedy_is_a_temperature_too_small_to_matter() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=2e-5).greedy


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


def test_logit_bias_takes_the_string_keys_of_json() -> None:
    assert SamplingParams(logit_bias={"5": -100, 7: 2}).logit_bias == {5: -100.0, 7: 2.0}


def test_null_is_the_same_as_not_said_except_for_max_tokens() -> None:
    params = SamplingParams(temperature=None, stop=None, max_tokens=None)
    assert params.temperature == 1.0
    assert params.stop_strings == ()
    assert params.max_tokens is None
    assert params.explicit == {"max_tokens"}


GENERATION = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 99,
    "eos_token_id": [1, 106], "do_sample": True, "n": 7,
}  # fmt: skip


def test_c10_generation_config_fills_what_was_not_said() -> None:
    params = SamplingParams().with_defaults(GENERATION)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.9, 0.05)
    assert (params.repetition_penalty, params.max_tokens, params.n) == (1.1, 99, 1)


def test_c10_a_request_wins_even_with_a_value_that_equals_the_default() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=None, top_k=0).with_defaults(GENERATION)
    assert (params.temperature, params.max_tokens, params.top_k) == (1.0, None, 0)
    assert params.top_p == 0.9


def test_c10_null_in_generation_config_is_absent() -> None:
    params = SamplingParams().with_defaults({"temperature": None, "max_new_tokens": None})
    assert (params.temperature, params.max_tokens) == (1.0, 16)


def test_c10_defaults_are_not_taken_for_a_request() -> None:
    once = SamplingParams(top_p=0.5).with_defaults({"temperature": 0.3})
    assert once.explicit == {"top_p"}
    assert once.with_defaults({"temperature": 0.4}).temperature == 0.4


def test_c10_a_bad_default_blames_the_file() -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p must be in \(0, 1\], got 7"):
        SamplingParams().with_defaults({"top_p": 7})
    assert SamplingParams(top_p=0.5).with_defaults({"top_p": 7}).top_p == 0.5


def test_what_was_said_survives_copies_and_processes() -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    for other in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), copy.copy(params)):
        assert other == params
        assert other.explicit == {"temperature", "seed"}
    changed = params.replace(seed=4, temperature=None)
    assert (changed.seed, changed.temperature, changed.explicit) == (4, 1.0, {"seed"})


def test_a_request_cannot_change_under_the_engine() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


def test_t3_ids_beyond_the_vocabulary_are_refused() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1}).check_vocabulary(10)
    with pytest.raises(UsageError, match="stop_token_ids: token id 10"):
        SamplingParams(stop_token_ids=[10]).check_vocabulary(10)
    with pytest.raises(UsageError, match="logit_bias: token id 12"):
        SamplingParams(logit_bias={12: 1}).check_vocabulary(10)


def test_end_tokens_are_the_models_and_the_requests() -> None:
    assert SamplingParams(stop_token_ids=[5]).end_token_ids([1, 2]) == {1, 2, 5}
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).end_token_ids([1, 2]) == {5}


def test_pooling_params() -> None:
    assert PoolingParams().normalize is None
    assert PoolingParams(pooling_type="MEAN", task="embed").pooling_type == "mean"
    for name, value in (
        ("dimensions", 0), ("pooling_type", "max"), ("task", "generate"), ("normalize", 1),
        ("truncate_prompt_tokens", 0),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=name):
            PoolingParams(**{name: value})


def test_importing_it_is_light() -> None:
    code = "import sys, modelbay_runtime.sampling_params; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
