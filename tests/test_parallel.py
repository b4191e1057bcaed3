"""Models over several processes: the same numbers as in one (BEHAVIOUR D1 to D3), and what happens when one dies.

Ranks as processes are slow to start, so each test starts one mesh and asks it everything. What a layer computes on its
rank is tested beside the layers, with threads for ranks.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from modelbay import LLM, SamplingParams
from modelbay.errors import EngineError, UsageError
from modelbay_testing.assets import smollm2_dir
from modelbay_testing.processes import ranks_of
from modelbay_testing.tiny import tiny_checkpoint

_PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=8, prompt_logprobs=3)
_OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 1 << 20,
    "distributed_timeout_seconds": 60,
}  # fmt: skip
_LIMIT = 1e-4
#: Heads, widths and layers that divide by 2 and by 4.
_LLAMA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
}


@contextmanager
def opened(path: str | Path, **options: Any) -> Iterator[LLM]:
    with LLM(str(path), **{**_OPTIONS, **options}) as llm:
        yield llm


def prompts() -> list[dict[str, Any]]:
    """Several, of lengths from one token to several chunks; two that begin alike."""
    lengths = [1, 3, 17, 30, 45, 45]
    ids = [[(7 * i * i + 3 * j) % 200 + 3 for i in range(length)] for j, length in enumerate(lengths)]
    ids[-1][:32] = ids[-2][:32]
    return [{"prompt_token_ids": each} for each in ids]


Answer = list[tuple[list[int], list[dict[int, float]]]]


def answers(llm: LLM) -> Answer:
    """Token ids, and the log-probabilities at every position of prompt and output."""
    found: Answer = []
    for output in llm.generate(prompts(), _PARAMS, use_tqdm=False):
        positions = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        rows = [{token: entry.logprob for token, entry in position.items()} for position in positions if position]
        found.append((list(output.outputs[0].token_ids), rows))
    return found


def worst_difference(first: Answer, second: Answer) -> float:
    """Over log-probabilities that both list; infinite where tokens or the tokens listed differ by more than a tie."""
    worst = 0.0
    for (ids, rows), (other_ids, other_rows) in zip(first, second, strict=True):
        if ids != other_ids or len(rows) != len(other_rows):
            return math.inf
        for row, other in zip(rows, other_rows, strict=True):
            shared = row.keys() & other.keys()
            if len(shared) < len(row) - 1:
                return math.inf
            worst = max(worst, *(abs(row[token] - other[token]) for token in shared))
    return worst


def check_equal(path: Path, options: dict[str, Any], sizes: dict[str, Any]) -> None:
    with opened(path, **options) as alone:
        expected = answers(alone)
    with opened(path, **options, **sizes) as llm:
        found = answers(llm)
        if sizes.get("tensor_parallel_size", 1) > 1:  # what was counted before is a number, and does not go on growing
            before = llm.engine.executor.traffic()
            llm.generate(prompts()[:1], _PARAMS, use_tqdm=False)
            after = llm.engine.executor.traffic()
            grown = [b.tp.calls["all_reduce"] < a.tp.calls["all_reduce"] for b, a in zip(before, after, strict=True)]
            assert sum(grown) >= len(grown) // sizes.get("data_parallel_size", 1)  # one prompt occupies one replica
        pools = [lane.kv.pool for lane in llm.engine.lanes]
        names = llm.apply_model(lambda module: type(module).__name__)
    assert worst_difference(expected, found) <= _LIMIT
    assert all(pool.num_free == pool.num_usable for pool in pools)
    ranks = math.prod(value for name, value in sizes.items() if name.endswith("_size"))
    assert names == [names[0]] * ranks


def sizes(tp: int = 1, pp: int = 1, dp: int = 1, ep: bool = False) -> dict[str, Any]:
    return {
        "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp,
        "enable_expert_parallel": ep,
    }  # fmt: skip


#: name -> (model_type, values, engine arguments)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", _LLAMA, {}),
    "llama-tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}, {}),
    "qwen2": ("qwen2", _LLAMA, {}),
    "llama, Transformers backend": ("llama", _LLAMA, {"model_impl": "transformers"}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}, {}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        {},
    ),
    # Smaller weights: with those of the others, other chunks alone move its logits by 2e-4, in one process.
    "gemma2": (
        "gemma2",
        {"num_hidden_layers": 4, "sliding_window": 20, "std": 0.1},
        {"kv_cache_memory_bytes": 8 << 20},
    ),
}
QUICK = [("llama", sizes(tp=2)), ("llama-tied", sizes(pp=2)), ("llama", sizes(dp=2))]
DEEP = [
    ("llama", sizes(tp=4)),
    ("llama", sizes(pp=4)),
    ("llama-tied", sizes(tp=2, pp=2)),
    ("llama", sizes(dp=2, tp=2)),
    ("qwen2", sizes(tp=2)),
    ("qwen2", sizes(tp=2, pp=2)),
    ("llama, Transformers backend", sizes(tp=2)),
    ("llama, Transformers backend", sizes(pp=2)),
    ("llama, Transformers backend", sizes(tp=2, pp=2)),
    ("qwen3_moe", sizes(tp=2)),
    ("qwen3_moe", sizes(tp=2, ep=True)),
    ("qwen3_moe", sizes(dp=2, ep=True)),
    ("qwen3_moe", sizes(tp=2, pp=2, ep=True)),
    ("deepseek_v3", sizes(tp=2)),
    ("deepseek_v3", sizes(tp=2, ep=True)),
    ("deepseek_v3", sizes(tp=2, pp=2)),
    ("deepseek_v3", sizes(dp=2, ep=True)),
    ("gemma2", sizes(tp=2)),
    ("gemma2", sizes(pp=2)),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_d2_a_few_ranks_give_what_one_process_gives(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    name, wanted = case
    model_type, values, options = MODELS[name]
    check_equal(tiny_checkpoint(tmp_path, model_type, **values), options, wanted)


@pytest.mark.deep
@pytest.mark.parametrize("case", DEEP, ids=str)
def test_d2_more_ranks_give_what_one_process_gives(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    name, wanted = case
    model_type, values, options = MODELS[name]
    check_equal(tiny_checkpoint(tmp_path, model_type, **values), options, wanted)


@pytest.mark.deep
@pytest.mark.parametrize("wanted", [sizes(tp=3), sizes(pp=2), sizes(dp=2)], ids=str)
def test_d2_smollm2_says_the_same(wanted: dict[str, Any]) -> None:
    """Greedy text of the real model in float32."""
    texts = []
    for extra in ({}, wanted):
        with opened(smollm2_dir("float32"), kv_cache_memory_bytes=64 << 20, **extra) as llm:
            outputs = llm.generate(
                ["The capital of France is", "def fibonacci(n):", "Once upon a time"],
                SamplingParams(temperature=0, max_tokens=32), use_tqdm=False,
            )  # fmt: skip
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert "Paris" in texts[0][0]


def test_d1_sizes_that_do_not_divide_are_refused_before_loading(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", **_LLAMA)
    (path / "model.safetensors").unlink()  # nothing is read before it is refused
    with pytest.raises(UsageError, match=r"num_attention_heads 4 is not divisible by 3"):
        LLM(str(path), **_OPTIONS, tensor_parallel_size=3)
    with pytest.raises(UsageError, match="pipeline_parallel_size = 5"):
        LLM(str(path), **_OPTIONS, pipeline_parallel_size=5)


def test_d1_more_ranks_than_the_machine_has_room_for_are_refused_before_one_starts(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", **_LLAMA)
    before = set(ranks_of(os.getpid()))
    with pytest.raises(UsageError, match=r"100000 ranks .* GiB before they hold any weights, and .* GiB are free"):
        LLM(str(path), **_OPTIONS, data_parallel_size=100_000)
    assert set(ranks_of(os.getpid())) <= before


# ---- what dies -----------------------------------------------------------------------------------------------------


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@contextmanager
def nothing_left_behind(seconds: float = 30.0) -> Iterator[None]:
    """The block ends within that time, and no process that it started is alive after it."""
    before, started = {child.pid for child in children()}, time.monotonic()
    yield
    assert time.monotonic() - started < seconds
    _, alive = psutil.wait_procs([child for child in children() if child.pid not in before], timeout=5)
    assert not alive


def fails_in_other_processes() -> Callable[[Any], None]:
    """Makes the module of every process but this one raise in its next forward pass."""
    parent = os.getpid()

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a kernel of rank 1 fell over")

    def change(module: Any) -> None:
        if os.getpid() != parent:
            module.forward = forward

    return change


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", **_LLAMA)


def test_d3_a_worker_that_raises_ends_the_run_with_its_own_traceback(llama: Path) -> None:
    with nothing_left_behind(60):
        llm = LLM(str(llama), **_OPTIONS, data_parallel_size=2)
        llm.apply_model(fails_in_other_processes())
        with pytest.raises(EngineError, match=r"(?s)rank 1 .*ValueError: a kernel of rank 1 fell over.*Traceback"):
            llm.generate(prompts(), _PARAMS, use_tqdm=False)
        with pytest.raises(EngineError, match=r"cannot be used any more.*fell over"):
            llm.generate(prompts(), _PARAMS, use_tqdm=False)
        llm.close()


@pytest.mark.parametrize("when", ["load", "decode"])
def test_d3_a_worker_that_is_killed_ends_the_run(llama: Path, when: str) -> None:
    before = {rank.pid for rank in ranks_of(os.getpid())}
    with nothing_left_behind(60):
        if when == "load":
            killer = threading.Thread(target=_kill_first_child, args=(before,))
            killer.start()
            with pytest.raises(EngineError, match=r"rank 1 .*signal 9"):
                LLM(str(llama), **_OPTIONS, data_parallel_size=2)
            killer.join()
            return
        llm = LLM(str(llama), **_OPTIONS, data_parallel_size=2)
        stream = llm.stream(prompts()[2], _PARAMS)
        next(stream)
        _kill_first_child(before)
        with pytest.raises(EngineError, match=r"rank 1 .*signal 9"):
            llm.generate(prompts(), _PARAMS, use_tqdm=False)
        llm.close()


def _kill_first_child(before: set[int]) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if started := [rank for rank in ranks_of(os.getpid()) if rank.pid not in before]:
            os.kill(started[0].pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def test_d3_workers_end_with_their_parent(llama: Path, tmp_path: Path) -> None:
    """Even if it is killed: nobody can tell them to."""
    script = tmp_path / "run.py"
    script.write_text(
        f"import time\nfrom modelbay import LLM\nllm = LLM({str(llama)!r}, **{_OPTIONS!r}, data_parallel_size=2)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = ranks_of(process.pid)
        assert workers
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def local_class_of(module: Any) -> Any:
    """A result whose class exists in this program alone."""

    class Found:
        name = type(module).__name__

    return Found()


def poison(module: Any) -> None:
    """Only requests with this token see NaN."""
    with torch.inference_mode():
        module.model.embed_tokens.weight[77].fill_(math.nan)


def listening(process: psutil.Process) -> set[str]:
    return {each.laddr.ip for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_a_replica_is_asked_for_everything_and_survives_bad_requests(llama: Path) -> None:
    """Hidden states, results of any class, values that are no numbers; and a model that nobody closes."""
    texts = prompts()[:4]
    with opened(llama) as alone:
        expected = [output.hidden_states for output in alone.encode(texts, use_tqdm=False)]
    threads = torch.get_num_threads()
    with nothing_left_behind(60):
        llm = LLM(str(llama), **_OPTIONS, data_parallel_size=2)
        for process in (psutil.Process(), *ranks_of(os.getpid())):
            assert listening(process) <= {"127.0.0.1", "::1"}  # whoever is not on this machine cannot reach it
        assert [found.name for found in llm.apply_model(local_class_of)] == ["LlamaForCausalLM"] * 2
        llm.apply_model(poison)
        bad = [{"prompt_token_ids": [77, 5]}] * 2  # one for each replica
        with pytest.raises(EngineError, match="not usable for request"):
            llm.generate(bad, _PARAMS, use_tqdm=False)
        with pytest.raises(EngineError, match="no numbers"):
            llm.encode([*texts, *bad], use_tqdm=False)
        found = [output.hidden_states for output in llm.encode(texts, use_tqdm=False)]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=_LIMIT)
        del llm
        gc.collect()
    assert torch.get_num_threads() == threads


@pytest.mark.deep
def test_ranks_that_share_the_last_stage_are_asked_between_rounds(llama: Path) -> None:
    """With a round under way: they are in the middle of it until rank 0 takes part."""
    with opened(llama) as alone:
        expected = [list(output.outputs[0].token_ids) for output in alone.generate(prompts()[:2], _PARAMS)]
    with nothing_left_behind(60):
        llm = LLM(str(llama), **_OPTIONS, tensor_parallel_size=2, pipeline_parallel_size=2)
        streams = [llm.stream(prompt, _PARAMS) for prompt in prompts()[:2]]
        for stream in streams:
            next(stream)
        assert llm.engine._rounds
        assert len(llm.apply_model(lambda module: type(module).__name__)) == 4
        assert [list(list(stream)[-1].outputs[0].token_ids) for stream in streams] == expected
        streams = [llm.stream(prompt, _PARAMS) for prompt in prompts()[:2]]
        for stream in streams:
            next(stream)
        closing = time.monotonic()
        llm.close()
        assert time.monotonic() - closing < 8  # nobody had to be killed


def test_two_models_over_ranks_share_nothing(llama: Path) -> None:
    """One of them in another thread, and a fork of this process that lets go of both."""
    with opened(llama) as alone:
        expected = answers(alone)
    threads, found = torch.get_num_threads(), {}

    def in_a_thread() -> None:
        with opened(llama, data_parallel_size=2) as llm:
            found["thread"] = answers(llm)

    with nothing_left_behind(60):
        other = threading.Thread(target=in_a_thread)
        other.start()
        with opened(llama, tensor_parallel_size=2) as llm:
            if not (child := os.fork()):
                llm.close()
                weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # as a process does that ends
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            found["main"] = answers(llm)
            other.join()
            assert answers(llm)[0][0] == expected[0][0]  # the other one's end is not this one's
    assert all(worst_difference(expected, found[name]) <= _LIMIT for name in ("main", "thread"))
    assert torch.get_num_threads() == threads


def test_ctrl_c_while_ranks_start_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    """Sent to every process of the terminal's group, as a terminal does; the ranks say nothing about it."""
    script = tmp_path / "run.py"
    script.write_text(
        "import time\nimport modelbay_runtime.llm\nfrom modelbay import LLM\nprint('ready', flush=True)\n"
        f"llm = LLM({str(llama)!r}, **{_OPTIONS!r}, data_parallel_size=2)\n"
        "time.sleep(60)\n"  # not at its end already, however late the signal comes
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until = time.monotonic() + 30
        while not (workers := ranks_of(process.pid)):
            assert time.monotonic() < until
            time.sleep(0.02)
        while workers[0].cpu_times().user < 0.5 and time.monotonic() < until:
            time.sleep(0.02)  # it imports, which is when it would have most to say
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert said.count("Traceback") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.deep
def test_d3_ranks_as_actors_of_a_ray_cluster(llama: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is an optional extra")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        check_equal(llama, {}, {**sizes(tp=2), "distributed_executor_backend": "ray"})
        llm = LLM(str(llama), **_OPTIONS, data_parallel_size=2, distributed_executor_backend="ray")
        llm.apply_model(fails_in_other_processes())
        with pytest.raises(EngineError, match=r"(?s)rank 1 .*ValueError: a kernel of rank 1 fell over"):
            llm.generate(prompts(), _PARAMS, use_tqdm=False)
        llm.close()
    finally:
        ray.shutdown()
