"""What several ranks cost: bytes and collectives per token beside the least that the algorithm needs, memory per rank
beside its share, and the executor's own time per step.

    python benchmarks/parallel.py --model DIR

On a machine of two cores several ranks cannot be faster than one; what is measured is what they add. The result goes to
benchmarks/results/NAME.json and into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compare import say, warn_if_busy
from comparison import machine
from comparison.report import record

from modelbay import LLM, SamplingParams
from modelbay.errors import ModelbayError
from modelbay_runtime.bench import Spread

#: Of what a rank holds: its share of the parameters, and a tied head's second form.
MEMORY_LIMIT = 1.1
#: Milliseconds per step, at one sequence.
STEP_LIMIT_MS = 1.0
_PROMPT = {"prompt_token_ids": list(range(5, 37))}
_TOKENS = 64


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        if options.peak_of:
            print(json.dumps(peak_of_rank(options.model, options.dtype, **json.loads(options.peak_of))))
            return 0
        result = run(options)
    except ModelbayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    name = options.name or f"{Path(options.model).resolve().stem}-parallel"
    print(record(name, result, options.json))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    made.add_argument("--model", metavar="DIR", required=True)
    made.add_argument("--tp", type=int, default=2, help="ranks that share each layer, in that part of the measurement")
    made.add_argument("--pp", type=int, default=2, help="stages, in that part")
    made.add_argument("--rounds", type=int, default=5, help="of the executor's time per step")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--name", help="of the result (default: the model's directory, and -parallel)")
    made.add_argument("--json", metavar="FILE", help="write the result there; leave results and documentation alone")
    made.add_argument("--peak-of", help=argparse.SUPPRESS)
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    about = {"kind": "parallel", "dtype": options.dtype, "rounds": options.rounds, **machine.facts()}
    warn_if_busy(about["machine"])
    with open_llm(options, {}) as llm:
        module, config = llm.engine.model, llm.resolution.config
        size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        model = {"architecture": llm.resolution.architecture, "bytes": size, "layers": config.num_layers}
        width = config.hidden_size * next(module.parameters()).element_size()
    return {
        **about,
        "model": model,
        "traffic": [
            tensor_traffic(options, config.num_layers, config.hidden_size, width),
            stage_traffic(options, width),
        ],
        "memory": [peak(options, sizes, rank) for sizes, ranks in meshes(options) for rank in range(ranks)],
        "memory_limit": MEMORY_LIMIT,
        "step": step_overhead(options),
        "step_limit_ms": STEP_LIMIT_MS,
    }


def open_llm(options: argparse.Namespace, sizes: dict[str, int]) -> LLM:
    return LLM(options.model, dtype=options.dtype, max_model_len=512, kv_cache_memory_bytes=64 << 20, **sizes)


def meshes(options: argparse.Namespace) -> list[tuple[dict[str, int], int]]:
    return [({"tensor_parallel_size": options.tp}, options.tp), ({"pipeline_parallel_size": options.pp}, options.pp)]


# ---- bytes and collectives -----------------------------------------------------------------------------------------


def decode(llm: LLM, tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(_PROMPT, params, use_tqdm=False)


def tensor_traffic(options: argparse.Namespace, layers: int, hidden: int, width: int) -> dict[str, Any]:
    """Rank 0's collectives in decode steps of one sequence; the least is two sums of one hidden state per layer."""
    say(f"bytes and collectives at tensor_parallel_size {options.tp}")
    with open_llm(options, {"tensor_parallel_size": options.tp}) as llm:
        counts = []
        for tokens in (1, 1 + _TOKENS):  # the difference is that many decode steps
            before = llm.engine.executor.traffic()[0].tp
            llm.engine.forget_prefixes()
            decode(llm, tokens)
            after = llm.engine.executor.traffic()[0].tp
            counts.append((_difference(after.calls, before.calls), _difference(after.bytes, before.bytes)))
    calls = {name: (counts[1][0][name] - counts[0][0][name]) / _TOKENS for name in counts[1][0]}
    sizes = {name: (counts[1][1][name] - counts[0][1][name]) / _TOKENS for name in counts[1][1]}
    return {
        "mesh": f"tensor_parallel_size {options.tp}",
        "calls": calls,
        "bytes": sizes,
        "least_calls": {"all_reduce": 2 * layers},
        "least_bytes": {"all_reduce": 2 * layers * width},
    }


def stage_traffic(options: argparse.Namespace, width: int) -> dict[str, Any]:
    """Bytes that all stages together give to the one after; the least is one hidden state per boundary and token."""
    say(f"bytes at pipeline_parallel_size {options.pp}")
    with open_llm(options, {"pipeline_parallel_size": options.pp}) as llm:
        before = sum(rank.stage_bytes for rank in llm.engine.executor.traffic())
        decode(llm, 1 + _TOKENS)
        after = sum(rank.stage_bytes for rank in llm.engine.executor.traffic())
    computed = len(_PROMPT["prompt_token_ids"]) + _TOKENS
    boundaries = options.pp - 1
    return {
        "mesh": f"pipeline_parallel_size {options.pp}",
        "calls": {"send": float(boundaries)},
        "bytes": {"send": (after - before) / computed},
        "least_calls": {"send": boundaries},
        "least_bytes": {"send": boundaries * width},
    }


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


# ---- memory --------------------------------------------------------------------------------------------------------


def peak(options: argparse.Namespace, sizes: dict[str, int], rank: int) -> dict[str, Any]:
    """Resident memory that a rank's part takes at its peak while it is loaded, over the bytes that it holds."""
    say(f"memory of rank {rank} of {sizes}")
    what = json.dumps({"sizes": sizes, "rank": rank})
    command = [sys.executable, __file__, "--model", options.model, "--dtype", options.dtype, "--peak-of", what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_of_rank(model: str, dtype: str, *, sizes: dict[str, int], rank: int) -> dict[str, Any]:
    """Load one rank's part in this process, alone. Linux: the kernel's own figures."""
    from modelbay import resolve
    from modelbay_runtime.build import build_model
    from modelbay_runtime.loading import load_weights
    from modelbay_runtime.parallel.context import ParallelContext
    from modelbay_runtime.parallel.mesh import Mesh

    resolution = resolve(model, dtype=dtype, **sizes)
    mesh = Mesh.of(resolution.args)
    built = build_model(resolution, ParallelContext.apart(mesh, mesh.place(rank)))
    copied = built.copied_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = _status("VmRSS")
    report = load_weights(built.module, resolution, device=built.context.device, dtype=built.context.dtype)
    taken, share = _status("VmHWM") - before, built.parameter_bytes()
    held = share + copied
    return {
        "mesh": " ".join(f"{name} {size}" for name, size in sizes.items()), "rank": rank, "share": share,
        "held": held, "ratio": taken / held, "read": report.bytes_read,
    }  # fmt: skip


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


# ---- the executor's own time ---------------------------------------------------------------------------------------


def step_overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Time per decode step of one sequence, with and without other ranks that have nothing to do.

    Of two replicas one computes what a process alone would: what it takes longer is the executor's.
    """
    torch.set_num_threads(1)  # which is what a rank of two has on two cores
    times: dict[str, list[float]] = {"inline": [], "led": []}
    with open_llm(options, {}) as inline, open_llm(options, {"data_parallel_size": 2}) as led:
        for number in range(options.rounds):
            say(f"executor, round {number + 1} of {options.rounds}")
            for name, llm in (("inline", inline), ("led", led)):
                times[name].append(_step_ms(llm))
    extra = [led - alone for led, alone in zip(times["led"], times["inline"], strict=True)]
    return {name: Spread.of(values).to_dict() for name, values in {**times, "extra": extra}.items()}


def _step_ms(llm: LLM) -> float:
    decode(llm, 4)
    started = time.perf_counter()
    decode(llm, _TOKENS)
    return (time.perf_counter() - started) / _TOKENS * 1e3


if __name__ == "__main__":
    sys.exit(main())
