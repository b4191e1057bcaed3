"""How many texts are embedded in a second, beside sentence-transformers, in one run.

    python benchmarks/embeddings.py --model DIR --rounds 5

Both hold the same model in the same dtype and embed the same texts, in turn; each round has new texts of mixed length,
most of them sentences, some of them paragraphs. Tokenizing is part of it. How far the embeddings of the two are apart
is recorded too. The result goes to benchmarks/results/NAME.json and into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compare import say, warn_if_busy
from comparison import machine
from comparison.report import record

from modelbay.errors import EngineError, ModelbayError, UsageError
from modelbay_runtime.bench import Spread, ratios

BASELINE = "sentence-transformers"
#: Of the baseline's rate.
TARGET = 1.5
#: Cosine distance of two embeddings of one text.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
#: Words of a text: half have fewer than this; the longest are cut.
_MEDIAN, _SPREAD, _LONGEST = 16, 0.9, 180

Embed = Callable[[list[str]], list[list[float]]]


@dataclass(frozen=True)
class Round:
    """Seconds that each engine took, and the largest cosine distance of an embedding to the baseline's."""

    seconds: dict[str, float]
    distance: float


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        result = run(options)
    except ModelbayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    name = options.name or f"{Path(options.model).resolve().stem}-embeddings"
    print(record(name, result, options.json))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    made.add_argument("--model", metavar="DIR", required=True, help="directory of an embedding model")
    made.add_argument("--texts", type=int, default=2000, help="in each round")
    made.add_argument("--rounds", type=int, default=5, help="counted rounds")
    made.add_argument("--dtype", default="float32", choices=tuple(TOLERANCE), help="that both run in")
    made.add_argument("--name", help="of the result (default: the model's directory, and -embeddings)")
    made.add_argument("--json", metavar="FILE", help="write the result there; leave results and documentation alone")
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    if min(options.rounds, options.texts) < 1:
        raise UsageError("--rounds and --texts must be at least 1.")
    about = {"kind": "embeddings", "dtype": options.dtype, "rounds": options.rounds, **machine.facts()}
    warn_if_busy(about["machine"])
    from modelbay import LLM

    with LLM(options.model, dtype=options.dtype) as llm:
        words = sorted(word for word in llm.get_tokenizer().get_vocab() if word.isalpha() and len(word) > 1)
        engines = {"modelbay": ours(llm), BASELINE: theirs(options.model, options.dtype)}
        rounds = measure(engines, lambda number: texts(words, options.texts, number), options.rounds)
        size = sum(parameter.nbytes for parameter in llm.engine.model.parameters())
        architecture = llm.resolution.architecture
    return {**about, "model": {"architecture": architecture, "bytes": size}, "engines": versions()} | summarize(
        rounds, options.texts, TOLERANCE[options.dtype]
    )


def ours(llm: Any) -> Embed:
    from modelbay import PoolingParams

    params = PoolingParams(truncate_prompt_tokens=-1)
    return lambda batch: [output.embedding for output in llm.embed(batch, params, use_tqdm=False)]


def theirs(model: str, dtype: str) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(
        model, device="cpu", local_files_only=True, model_kwargs={"dtype": getattr(torch, dtype)}
    )
    return lambda batch: loaded.encode(batch, show_progress_bar=False, convert_to_tensor=True).float().tolist()


def versions() -> dict[str, Any]:
    import torch

    threads = torch.get_num_threads()
    return {
        "modelbay": {"threads": threads, "versions": {"torch": version("torch")}},
        BASELINE: {
            "threads": threads,
            "versions": {name: version(name) for name in ("sentence-transformers", "transformers")},
        },
    }


def texts(words: Sequence[str], count: int, seed: int) -> list[str]:
    """Texts of words, their lengths log-normal; the same for everybody."""
    draw = random.Random(seed)
    lengths = [min(_LONGEST, max(1, round(_MEDIAN * draw.lognormvariate(0, _SPREAD)))) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


def measure(engines: dict[str, Embed], make: Callable[[int], list[str]], rounds: int) -> list[Round]:
    """Interleaved; the first round warms up and is not counted."""
    found = []
    for number in range(rounds + 1):
        batch = make(number)
        seconds: dict[str, float] = {}
        results: dict[str, list[list[float]]] = {}
        for name, embed in engines.items():
            started = time.perf_counter()
            results[name] = embed(batch)
            seconds[name] = time.perf_counter() - started
        found.append(Round(seconds, farthest(*results.values())))
        shown = ", ".join(f"{name} {len(batch) / own:,.0f}/s" for name, own in seconds.items())
        say(f"{f'round {number}' if number else 'warm-up'}: {shown}")
    return found[1:]


def farthest(first: list[list[float]], second: list[list[float]]) -> float:
    """The largest cosine distance between the two embeddings of one text.

    Raises:
        EngineError: they have not the same shape.
    """
    import torch

    left, right = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    if left.shape != right.shape:
        raise EngineError(f"the engines gave embeddings of shape {tuple(left.shape)} and {tuple(right.shape)}.")
    return float((1 - torch.nn.functional.cosine_similarity(left, right, dim=-1)).max())


def summarize(rounds: Sequence[Round], count: int, tolerance: float) -> dict[str, Any]:
    """Rates, and their ratio to the baseline's, round by round."""
    rates = {name: [count / one.seconds[name] for one in rounds] for name in rounds[0].seconds}
    rows = {
        name: {**Spread.of(values).to_dict(), "ratio": ratios(values, rates[BASELINE]).to_dict()}
        for name, values in rates.items()
    }
    distance = max(one.distance for one in rounds)
    return {
        "baseline": BASELINE,
        "texts": count,
        "rates": rows,
        "target": TARGET,
        "within_target": rows["modelbay"]["ratio"]["median"] >= TARGET,
        "distance": distance,
        "agrees": distance <= tolerance,
    }


if __name__ == "__main__":
    sys.exit(main())
