"""How fast weights are loaded, and how much memory that takes at its peak, beside plain safetensors and Transformers.

Loader ``modelbay`` ends where the others do, with every parameter in memory in the dtype asked for.
``modelbay-repacked`` goes on to what the kernels that are chosen here multiply fastest, which the others leave to every
single step.

    python benchmarks/loading.py --model DIR --rounds 5

Each load runs in a fresh process, in turn, from files that are warm in the page cache. Linux only: the peak is the
kernel's own. The result goes to benchmarks/results/NAME.json and into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compare import say, warn_if_busy
from comparison import machine
from comparison.processes import EngineSpec
from comparison.report import record

from modelbay import resolve
from modelbay.errors import EngineError, ModelbayError, UsageError
from modelbay_runtime.bench import Spread, ratios

LOADERS = ("modelbay", "modelbay-repacked", "safetensors", "hf")
BASELINE = "safetensors"
#: Of the baseline's time: 0.9 of its speed.
TIME_LIMIT = round(1 / 0.9, 3)

OURS = ("modelbay", "modelbay-repacked")

Load = Callable[[str], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        result = run(options)
    except ModelbayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    name = options.name or f"{Path(options.model).resolve().stem}-loading"
    print(record(name, result, options.json))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    made.add_argument("--model", metavar="DIR", required=True, help="directory with safetensors files")
    made.add_argument("--rounds", type=int, default=5, help="counted loads of each")
    made.add_argument("--dtype", default="bfloat16", help="that the weights are converted to")
    made.add_argument("--name", help="of the result (default: the model's directory, and -loading)")
    made.add_argument("--json", metavar="FILE", help="write the result there; leave results and documentation alone")
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {options.rounds}.")
    if not any(Path(options.model).glob("*.safetensors")):
        raise UsageError(f"{options.model} has no safetensors files, and plain safetensors is what is compared with.")
    resolution = resolve(options.model, dtype=options.dtype)
    about = {"kind": "loading", "dtype": options.dtype, "rounds": options.rounds, **machine.facts()}
    warn_if_busy(about["machine"])
    measured = measure(lambda name: load(name, options.model, options.dtype), options.rounds)
    size = measured["modelbay"][0]["bytes"]
    return {**about, "model": {"architecture": resolution.architecture, "bytes": size}} | summarize(measured)


def measure(load: Load, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Interleaved; the first round warms the page cache and is not counted."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADERS}
    for number in range(rounds + 1):
        for name in LOADERS:
            runs[name].append(load(name))
        shown = ", ".join(f"{name} {own[-1]['seconds']:.2f} s" for name, own in runs.items())
        say(f"{f'round {number}' if number else 'warm-up'}: {shown}")
    return {name: own[1:] for name, own in runs.items()}


def summarize(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Times with their ratio to the baseline; peaks over the bytes of the parameters, beside the limit for ours."""
    own = runs["modelbay"][0]
    seconds = {name: [run["seconds"] for run in loads] for name, loads in runs.items()}
    peaks = {name: Spread.of(run["peak_bytes"] / own["bytes"] for run in loads) for name, loads in runs.items()}
    loaders = {
        name: {
            **Spread.of(values).to_dict(),
            "ratio": ratios(values, seconds[BASELINE]).to_dict(),
            "peak": peaks[name].to_dict(),
        }
        for name, values in seconds.items()
    }
    limit = round(1.15 + own["largest_tensor"] / own["bytes"], 3)
    within = all(max(peaks[name].values) <= limit for name in OURS)
    fast = loaders["modelbay"]["ratio"]["median"] <= TIME_LIMIT
    limits = {"limit": limit, "within_limit": within, "time_limit": TIME_LIMIT, "within_time_limit": fast}
    return {"baseline": BASELINE, "loaders": loaders, **limits}


def load(name: str, model: str, dtype: str) -> dict[str, Any]:
    """One load in a fresh process.

    Raises:
        EngineError: it failed; with the last line that it printed.
    """
    command = [sys.executable, "-m", "comparison.loaders", name, model, dtype]
    environment = EngineSpec(name, "").environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "nothing on standard error").splitlines()[-1]
        raise EngineError(f"loader {name} ended with code {done.returncode}: {said}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
