"""What an error, or Ctrl-C, leaves behind: an engine that works, blocks that are free, nobody else harmed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM, PoolingParams, SamplingParams
from modelbay.errors import BackendError, EngineError, UsageError

TEXT = "A model is loaded, its layers"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm("llama")


def no_block_is_held(llm: LLM) -> bool:
    engine = llm.engine
    return (
        engine.kv.pool.num_free == engine.kv.pool.num_usable
        and not engine.requests
        and not engine.scheduler.has_work
        and len(engine.kv._free_slots) == llm.resolution.args.max_num_seqs
    )


def test_ctrl_c_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(llm.generate(TEXT, GREEDY)[0])
    run, left = llm.engine.runner.run, [3]

    def interrupted(scheduled: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return run(scheduled)

    stream = llm.stream("The quick brown", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXT, "The quick"], GREEDY)
    others = [output.outputs[0].token_ids for output in stream]  # a request of somebody else goes on
    assert others[-1] == ids_of(llm.generate("The quick brown", GREEDY)[0])
    assert no_block_is_held(llm)
    assert ids_of(llm.generate(TEXT, GREEDY)[0]) == expected


# -- logits that are no numbers


def poison(token_id: int, value: float) -> Callable[[torch.nn.Module], torch.Tensor]:
    """Set a token's embedding, and return what it was: only requests with this token see the value."""

    def change(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            row = model.model.embed_tokens.weight[token_id]
            before = row.clone()
            row.copy_(torch.as_tensor(value) if isinstance(value, float) else value)
        return before

    return change


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 16}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_nan_logits_name_the_request_and_leave_the_engine_usable(
    name: str, options: dict[str, Any], open_llm: Callable[..., LLM]
) -> None:
    """Without a trace of NaN in the cache, which would reach others through masked keys: 0 × NaN is NaN.

    The cache is so small that every block is soon used again.
    """
    llm = open_llm(name, max_num_seqs=8, max_model_len=96, kv_cache_memory_bytes=24 * 8192, **options)
    clean = [{"prompt_token_ids": [1, *range(10, 10 + length)]} for length in (3, 30, 60)]
    bad = {"prompt_token_ids": [*range(10, 50), 77, *range(10, 20)]}
    expected = [ids_of(output) for output in llm.generate([*clean, bad], GREEDY)]
    (row,) = llm.apply_model(poison(77, math.nan))
    for _ in range(2):
        stream = llm.stream(clean[2], GREEDY)
        begun = ids_of(next(stream))
        with pytest.raises(EngineError, match=r"not usable for request '\d+' \(nan\); no token was chosen") as caught:
            llm.generate([*clean, bad], GREEDY)
        assert caught.value.exit_code == 1
        assert caught.value.hint
        assert begun == expected[2][:1]
        # Somebody else's request goes on, and so does the engine.
        assert [ids_of(output) for output in stream][-1] == expected[2]
        assert no_block_is_held(llm)
        for _ in range(4):
            assert [ids_of(output) for output in llm.generate(clean, GREEDY)] == expected[:3]
    llm.apply_model(poison(77, row))
    assert [ids_of(output) for output in llm.generate([bad, *clean], GREEDY)] == [expected[3], *expected[:3]]
    assert no_block_is_held(llm)


@pytest.mark.parametrize("chunk", [8, 16, 2048])
def test_the_request_that_is_named_is_the_one_with_bad_logits(chunk: int, open_llm: Callable[..., LLM]) -> None:
    """Also when its prompt was partly computed while others decoded, in blocks that were theirs before."""
    llm = open_llm(
        "llama",
        max_num_batched_tokens=chunk,
        block_size=4,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=60 * 2048,
    )
    llm.apply_model(poison(77, math.nan))
    bad, wary = [77, *range(10, 60)], GREEDY.replace(logit_bias={77: -100})
    for turn in range(8):
        llm.generate([[1, *range(10, 10 + length)] for length in (40, 60, 10, 50)], wary)
        streams = [llm.stream([1, *range(10, 10 + length + turn)], wary) for length in (2, 30)]
        for stream in streams:
            next(stream)
        number = int(llm.generate([5], wary)[0].request_id) + 1
        with pytest.raises(EngineError, match=rf"for request '{number}' \(nan\);"):
            llm.generate([bad], GREEDY)
        for stream in streams:
            stream.close()


def test_an_activation_that_no_kernel_has_is_refused_before_weights_are_read(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(BackendError, match="no activation 'quick_gelu'"):
        LLM(str(checkpoint("llama")), model_impl="native", hf_overrides={"hidden_act": "quick_gelu"})


def test_pooling_settings_that_would_have_no_effect_are_refused(llm: LLM, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="normalize, dimensions would have no effect"):
        llm.encode({"prompt_token_ids": [5, 6]}, PoolingParams(normalize=True, dimensions=8))
    with pytest.raises(UsageError, match="pooler_config is about pooling, and this model was resolved to generate"):
        LLM(str(checkpoint("llama")), pooler_config={"pooling_type": "mean"})
