"""How large the KV cache is, and what is done when the model's length does not fit it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelbay import LLM, SamplingParams
from modelbay.args import EngineArgs
from modelbay.errors import EngineError, UsageError
from modelbay_runtime.engine import memory
from modelbay_runtime.engine.kv_layout import plan_layout
from modelbay_runtime.engine.memory import free_bytes, plan_cache, step_bytes
from modelbay_runtime.kv_spec import FullKV, KVSpec, NoKV, SlidingKV, StateKV

CPU = torch.device("cpu")
GIB = 2**30
#: 1,024 elements in a block of 16 tokens, per layer.
FULL = FullKV(2, 16, 16)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``machine(8 * GIB)`` has so much free; ``machine(…, limit=…, usage=…)`` also runs us in a container."""

    def pretend(available: int, **cgroup: Any) -> None:
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
        folder = tmp_path / "cgroup"
        folder.mkdir(exist_ok=True)
        for name, value in cgroup.items():
            (folder / name).write_text(f"{value}\n")
        groups = [(str(tmp_path / "none"), "limit", "usage", "cold"), (str(folder), "limit", "usage", "cold")]
        monkeypatch.setattr(memory, "_CGROUPS", tuple(groups))

    return pretend


def plan(specs: dict[int, KVSpec], itemsize: int = 4, max_model_len: int = 256, **args: Any) -> Any:
    config: Any = SimpleNamespace(
        hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_size=16, vocab_size=256,
        max_model_len=max_model_len,
    )  # fmt: skip
    arguments = EngineArgs(**args)
    layout = plan_layout(specs, arguments.block_size)
    return plan_cache(layout, config, arguments, CPU, itemsize, max_model_len), step_bytes(config, arguments, itemsize)


# -- what is free


def test_a_share_of_what_is_free(machine: Callable[..., None]) -> None:
    machine(8 * GIB)
    assert free_bytes(CPU, 0.5) == 4 * GIB
    assert free_bytes(CPU, 1) == 8 * GIB


@pytest.mark.parametrize(
    ("cgroup", "free"),
    [
        ({"limit": 3 * GIB, "usage": GIB, "memory.stat": "anon 5\ncold 0"}, 2 * GIB),
        ({"limit": 3 * GIB, "usage": 3 * GIB, "memory.stat": f"anon 5\ncold {GIB}"}, GIB),
        ({"limit": 3 * GIB, "usage": GIB, "memory.stat": "anon 5"}, 2 * GIB),
        ({"limit": "max", "usage": GIB, "memory.stat": "cold 0"}, 8 * GIB),
        ({"limit": 2**63 - 4096, "usage": GIB, "memory.stat": "cold 0"}, 8 * GIB),
        ({"limit": "what", "usage": GIB, "memory.stat": "cold 0"}, 8 * GIB),
        ({"limit": 3 * GIB}, 8 * GIB),
        ({}, 8 * GIB),
    ],
    ids=str,
)
def test_a_container_s_limit_counts_and_its_file_cache_does_not(
    cgroup: dict[str, Any], free: int, machine: Callable[..., None]
) -> None:
    machine(8 * GIB, **cgroup)
    assert free_bytes(CPU, 1) == free


# -- how many blocks


def test_the_share_less_a_step_is_cut_into_blocks(machine: Callable[..., None]) -> None:
    machine(10 * GIB)
    _, step = plan({0: FULL, 1: FULL}, max_num_seqs=100_000, gpu_memory_utilization=0.5)
    assert step > 100_000 * 256 * 8
    machine(2 * step + 20_000_000)
    budget, _ = plan({0: FULL, 1: FULL}, max_num_seqs=100_000, gpu_memory_utilization=0.5)
    assert budget.num_blocks == 10_000_000 // (2 * 1024 * 4)
    assert budget.bytes == budget.num_blocks * 2 * 1024 * 4
    assert budget.source == "0.5 of what is free on cpu, less the activations of a step"


def test_never_more_than_the_sequences_can_use(machine: Callable[..., None]) -> None:
    machine(100 * GIB)
    budget, _ = plan({0: FULL}, max_num_seqs=3)
    assert (budget.num_blocks, budget.bytes) == (3 * 16 + 1, 49 * 4096)
    assert budget.source == "all that max_num_seqs=3 sequences can use"
    windowed, _ = plan({0: SlidingKV(2, 16, 16, 33)}, max_num_seqs=3, max_num_batched_tokens=16)
    # The window and a chunk of 16 take at most 4 blocks and one more, since neither begins where a block does.
    assert 3 * 4 + 1 <= windowed.num_blocks <= 3 * 6 + 1


def test_bytes_that_were_asked_for_are_kept(machine: Callable[..., None]) -> None:
    machine(0)
    budget, _ = plan({0: FULL}, kv_cache_memory_bytes=10 * 4096 + 4095)
    assert (budget.num_blocks, budget.bytes, budget.source) == (10, 10 * 4096, "kv_cache_memory_bytes")
    half, _ = plan({0: FULL}, itemsize=2, kv_cache_memory_bytes=10 * 4096)
    assert half.num_blocks == 20


def test_no_room_is_an_error_with_the_numbers(machine: Callable[..., None]) -> None:
    machine(1000)
    with pytest.raises(EngineError, match=r"no room for the KV cache: 0 bytes \(0.9 of .* and one block takes 4,096"):
        plan({0: FULL})
    with pytest.raises(EngineError, match=r"4,097 bytes \(kv_cache_memory_bytes\), and one block takes 4,096"):
        plan({0: FULL}, kv_cache_memory_bytes=4097)


def test_layers_that_keep_nothing_need_nothing(machine: Callable[..., None]) -> None:
    machine(0)
    budget, _ = plan({0: NoKV()})
    assert (budget.num_blocks, budget.bytes) == (1, 0)


def test_kinds_side_by_side_take_from_one_pool(machine: Callable[..., None]) -> None:
    machine(100 * GIB)
    specs = {0: FULL, 1: SlidingKV(2, 16, 16, 33), 2: StateKV(900), 3: FULL}
    layout = plan_layout(specs, 16)
    budget, _ = plan(specs, max_num_seqs=1, max_num_batched_tokens=16)
    assert budget.num_blocks == layout.blocks_for(256, 16) + 1
    assert budget.bytes == budget.num_blocks * layout.page_elements() * 4


# -- what the engine makes of it


def test_a_length_that_nobody_asked_for_shrinks_to_what_fits_and_the_trace_warns(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm("llama", kv_cache_memory_bytes=11 * 8192)
    assert llm.engine.max_model_len == 160
    (warning,) = [decision for decision in llm.resolution.trace.warnings() if decision.question == "max_model_len"]
    assert (warning.answer, warning.source) == (160, "the cache holds no more (512 in the config)")
    (output,) = llm.generate({"prompt_token_ids": [5] * 159}, SamplingParams(max_tokens=9, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(UsageError, match="has 160 tokens; with max_model_len=160"):
        llm.generate({"prompt_token_ids": [5] * 160})


def test_a_length_that_was_asked_for_is_kept_or_refused(open_llm: Callable[..., LLM]) -> None:
    assert open_llm("llama", kv_cache_memory_bytes=11 * 8192, max_model_len=160).engine.max_model_len == 160
    with pytest.raises(EngineError, match=r"max_model_len=161 needs 11 cache blocks for one sequence, and 10 fit"):
        open_llm("llama", kv_cache_memory_bytes=11 * 8192, max_model_len=161)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 200},
        {"max_num_batched_tokens": 16, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 50, "block_size": 4, "enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kilobytes", [50, 120, 300])
def test_a_sequence_of_the_length_that_was_promised_runs(
    name: str, options: dict[str, Any], kilobytes: int, open_llm: Callable[..., LLM]
) -> None:
    """Whatever the kinds of layers, chunks and blocks."""
    llm = open_llm(name, kv_cache_memory_bytes=kilobytes * 1024, max_num_seqs=1, **options)
    length = llm.engine.max_model_len
    for prompt in (length - 1, max(1, length // 2)):
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5] * prompt}, params)
        assert len(output.outputs[0].token_ids) == length - prompt
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_usable


def test_memory_that_is_not_used_is_not_taken(open_llm: Callable[..., LLM]) -> None:
    """A cache of gigabytes costs nothing before its blocks are written."""
    import psutil

    before = psutil.Process().memory_info().rss
    llm = open_llm("llama", max_num_seqs=30_000)
    size = sum(tensor.numel() * tensor.element_size() for tensor in llm.engine.cache.tensors)
    assert psutil.Process().memory_info().rss - before < size / 4
    assert size > GIB
