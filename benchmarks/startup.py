"""What commands cost that run no model, each beside an interpreter that imports no more than it has to, in one run.

    python benchmarks/startup.py --rounds 20

Every command is a fresh process, in turn with its baseline. Compared is CPU time (user and system), which another
process on the machine disturbs less than wall time; both are recorded. The result goes to
benchmarks/results/startup.json and into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import say, warn_if_busy
from comparison import machine
from comparison.checkpoints import DEEPSEEK_V3, LLAMA, OLMO2, write_config
from comparison.report import record

from modelbay.errors import EngineError, ModelbayError, UsageError
from modelbay_runtime.bench import Spread, ratios

#: Seconds that `explain` may take on a model of DeepSeek-V3's size, its module built on meta.
LARGE_LIMIT = 30.0


@dataclass(frozen=True)
class Group:
    """Commands beside one baseline. ``limit``: of the ratio, where there is one."""

    baseline: str
    code: str
    commands: dict[str, list[str]]
    limit: float | None = None


@dataclass(frozen=True)
class Cost:
    """Of one process, in seconds."""

    cpu: float
    wall: float


Run = Callable[[Sequence[str]], Cost]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="how often each command is run")
    parser.add_argument("--large-rounds", type=int, default=3, help="the same of explain on a model of V3's size")
    parser.add_argument("--json", metavar="FILE", help="write the result there; leave results and documentation alone")
    options = parser.parse_args(argv)
    try:
        if min(options.rounds, options.large_rounds) < 1:
            raise UsageError("--rounds and --large-rounds must be at least 1.")
        with tempfile.TemporaryDirectory(prefix="modelbay-startup-") as folder:
            result = measure(groups(Path(folder)), large(Path(folder)), options.rounds, options.large_rounds, run)
    except ModelbayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(record("startup", result, options.json))
    return 0


def groups(folder: Path) -> list[Group]:
    """What is measured. The configs of local models are written below ``folder``."""
    llama, olmo2 = write_config(folder / "llama", LLAMA), write_config(folder / "olmo2", OLMO2)
    light = {name: [name] for name in ("--version", "--help", "list-archs")}
    return [
        Group("import click, pluggy", "import click, pluggy", {**light, "list-archs --json": ["list-archs", "--json"]}),
        Group(
            "Transformers' LlamaConfig alone",
            "from transformers import LlamaConfig",
            {"explain --no-build, a type that a plugin has": ["explain", "--no-build", str(llama)]},
            limit=1.3,
        ),
        Group(
            "Transformers' Olmo2Config alone",
            "from transformers import Olmo2Config",
            {"explain --no-build, a type that Transformers has": ["explain", "--no-build", str(olmo2)]},
            limit=1.3,
        ),
    ]


def large(folder: Path) -> list[str]:
    """`explain` on DeepSeek-V3's own config: 671 billion parameters on meta."""
    return ["explain", "--device", "cpu", str(write_config(folder / "deepseek-v3", DEEPSEEK_V3))]


def measure(groups: list[Group], large: list[str], rounds: int, large_rounds: int, run: Run) -> dict[str, Any]:
    """Interleaved: every round runs each baseline and its commands once. The first round warms the disk cache."""
    about = {"kind": "startup", "rounds": rounds, **machine.facts()}
    warn_if_busy(about["machine"])
    costs: dict[str, list[Cost]] = {}
    for number in range(rounds + 1):
        for group in groups:
            samples = {group.baseline: run([sys.executable, "-c", group.code])}
            samples |= {name: run(_modelbay(argv)) for name, argv in group.commands.items()}
            for name, cost in samples.items() if number else ():
                costs.setdefault(name, []).append(cost)
        say(f"round {number}" if number else "warm-up")
    seconds = [run(_modelbay(large)).wall for _ in range(large_rounds)]
    return {
        **about,
        "groups": [_summary(group, costs) for group in groups],
        "large": {**Spread.of(seconds).to_dict(), "limit": LARGE_LIMIT, "within_limit": max(seconds) <= LARGE_LIMIT},
    }


def _summary(group: Group, costs: dict[str, list[Cost]]) -> dict[str, Any]:
    base = costs[group.baseline]
    rows = {name: _row(costs[name], base) for name in (group.baseline, *group.commands)}
    row: dict[str, Any] = {"baseline": group.baseline, "commands": rows}
    if group.limit is not None:
        worst = max(rows[name]["ratio"]["median"] for name in group.commands)
        row |= {"limit": group.limit, "within_limit": worst <= group.limit}
    return row


def _row(values: list[Cost], base: list[Cost]) -> dict[str, Any]:
    return {
        "cpu": Spread.of(cost.cpu for cost in values).to_dict(),
        "wall": Spread.of(cost.wall for cost in values).to_dict(),
        "ratio": ratios([cost.cpu for cost in values], [cost.cpu for cost in base]).to_dict(),
        "wall_ratio": ratios([cost.wall for cost in values], [cost.wall for cost in base]).to_dict(),
    }


def _modelbay(argv: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "modelbay", *argv]


def run(command: Sequence[str]) -> Cost:
    """One process, to its end.

    Raises:
        EngineError: it failed; with the last line that it printed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=_environment())
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            last = (said.read().strip() or "nothing on standard error").splitlines()[-1]
            raise EngineError(f"{' '.join(command[1:4])} … ended with code {process.returncode}: {last}")
    return Cost(usage.ru_utime + usage.ru_stime, wall)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    sys.exit(main())
