"""How fast each tokenizer mode encodes, measured in turn in one run on the same texts.

    python benchmarks/tokenizer_modes.py --tokenizer DIR --rounds 7 --json

The texts are pieces of Python's own library, one call for each, on one thread. Reports the median megabytes of UTF-8
per second of each mode, and the ratio of each round to mode hf of the same round: its median and range.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modelbay.args import EngineArgs
from modelbay.plugins import load_plugins
from modelbay.source import find_repository
from modelbay.tokenizer import load_tokenizer
from modelbay.trace import Trace
from modelbay_testing.python_tokenizer import python_twin

BASELINE = "hf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="directory of a tokenizer")
    parser.add_argument("--modes", default="hf,fastokens", help="modes, separated by commas; hf is the baseline")
    parser.add_argument("--rounds", type=int, default=7, help="how often each mode encodes all texts")
    parser.add_argument("--texts", type=int, default=3000, help="how many texts")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    modes = options.modes.split(",")
    with tempfile.TemporaryDirectory(prefix="modelbay-tokenizer-") as twin:
        # Where a tokenizer is Rust alone, mode slow is measured on the Python class for the same vocabulary.
        slow = str(python_twin(Path(options.tokenizer), Path(twin))) if "slow" in modes else options.tokenizer
        folders = {mode: slow if mode == "slow" else options.tokenizer for mode in (BASELINE, *modes)}
        result = measure(folders, options.rounds, texts_of(options.texts))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for mode, row in result["modes"].items():
        low, high = row["range"]
        print(f"{mode:12} {row['mb_per_s']:6.2f} MB/s   {row['ratio']:.2f} x {BASELINE}   ({low:.2f} to {high:.2f})")


def texts_of(count: int) -> list[str]:
    """Pieces of 1 to 11 lines, always the same ones of the same Python."""
    draw = random.Random(1)
    sources = [
        path.read_text("utf-8", "replace").splitlines()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    texts = []
    for _ in range(count):
        lines = draw.choice(sources)
        begin = draw.randrange(max(len(lines), 1))
        texts.append("\n".join(lines[begin : begin + draw.randrange(1, 12)]))
    return texts


def measure(folders: dict[str, str], rounds: int, texts: list[str]) -> dict[str, Any]:
    """Interleaved: every round encodes with each mode once. The first round does not count.

    Args:
        folders: of the tokenizer, by mode.
    """
    tokenizers = {mode: load(folder, mode) for mode, folder in folders.items()}
    expected = [tokenizers[BASELINE](text)["input_ids"] for text in texts]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rates: dict[str, list[float]] = {mode: [] for mode in tokenizers}
    for number in range(rounds + 1):
        for mode, tokenizer in tokenizers.items():
            begin = time.perf_counter()
            found = [tokenizer(text)["input_ids"] for text in texts]
            seconds = time.perf_counter() - begin
            if found != expected:
                raise SystemExit(f"mode {mode} gives other ids than {BASELINE}: no speed is worth that")
            if number:
                rates[mode].append(megabytes / seconds)
    return {
        "texts": len(texts),
        "rounds": rounds,
        "modes": {mode: summary(rates[mode], rates[BASELINE]) for mode in rates},
    }


def summary(values: list[float], baseline: list[float]) -> dict[str, Any]:
    ratios = [value / base for value, base in zip(values, baseline, strict=True)]
    return {
        "mb_per_s": statistics.median(values),
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
    }


def load(folder: str, mode: str) -> Any:
    config: Any = SimpleNamespace(vocab_size=10**9, eos_token_ids=())
    args = EngineArgs.create(folder, tokenizer_mode=mode)
    return load_tokenizer(find_repository(folder, trace=Trace()), config, load_plugins([]), args, Trace())


if __name__ == "__main__":
    main()
