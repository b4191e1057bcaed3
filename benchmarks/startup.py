"""What `modelbay list-archs` costs beside `import click, pluggy`, measured in turn in one run.

    python benchmarks/startup.py --rounds 20 --json

Reports the median of each in milliseconds, and the ratio of each round to the baseline of the same round: its median
and quartiles. Absolute times mean nothing on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

BASELINE = [sys.executable, "-c", "import click, pluggy"]
COMMANDS = {
    "list-archs": ["list-archs"],
    "list-archs --json": ["list-archs", "--json"],
    "--help": ["--help"],
    "--version": ["--version"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="how often each command is run")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    result = measure(options.rounds)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"baseline (import click, pluggy): {result['baseline_ms']:.0f} ms")
    for name, row in result["commands"].items():
        low, high = row["quartiles"]
        print(f"{name:20} {row['ms']:5.0f} ms   {row['ratio']:.2f} x baseline   (quartiles {low:.2f} to {high:.2f})")


def measure(rounds: int) -> dict:
    """Interleaved: every round runs the baseline and then each command once. The first round warms the disk cache."""
    commands = {name: [sys.executable, "-m", "modelbay", *argv] for name, argv in COMMANDS.items()}
    times: dict[str, list[float]] = {name: [] for name in commands}
    baseline: list[float] = []
    for number in range(rounds + 1):
        sample = {"baseline": seconds(BASELINE)} | {name: seconds(command) for name, command in commands.items()}
        if number:
            baseline.append(sample.pop("baseline"))
            for name, value in sample.items():
                times[name].append(value)
    return {
        "rounds": rounds,
        "baseline_ms": statistics.median(baseline) * 1e3,
        "commands": {name: summary(values, baseline) for name, values in times.items()},
    }


def summary(values: list[float], baseline: list[float]) -> dict:
    ratios = [value / base for value, base in zip(values, baseline, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"ms": statistics.median(values) * 1e3, "ratio": middle, "quartiles": [low, high]}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
