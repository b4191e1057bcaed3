"""Measuring throughput: what is run (shapes and prompts), how a run is timed and checked, and what is reported.

Imports nothing heavy. An engine is anything with ``generate(prompts, max_tokens) -> outputs`` over token ids, so that
the command ``bench`` and comparisons with other engines measure the same thing.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelbay.errors import EngineError, UsageError

if TYPE_CHECKING:
    from modelbay_runtime.llm import LLM

TokenIds = list[int]
Generate = Callable[[list[TokenIds], int], list[TokenIds]]

#: One sequence, two batches, one long prompt.
DEFAULT_SHAPES = "1x32+64,8x128+64,32x128+64,1x1024+1"
#: Prompts are made before anything runs: a number beyond this would only fill the memory.
MAX_NUMBER = 1_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """``sequences`` at once, each of ``prompt`` tokens in and ``output`` tokens out; written ``8x128+64``."""

    sequences: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``8x128+64``.

        Raises:
            UsageError: not of this form, or a number below 1.
        """
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text.strip())
        numbers = [int(number) for number in match.groups()] if match else []
        if not numbers or min(numbers) < 1:
            raise UsageError(
                f"shape {text.strip()!r} is not SEQUENCESxPROMPT+OUTPUT with numbers of at least 1.",
                hint="For example 8x128+64: 8 sequences, 128 prompt tokens and 64 output tokens each.",
            )
        if max(numbers) > MAX_NUMBER:
            raise UsageError(f"shape {text.strip()!r} is more than a machine measures; {MAX_NUMBER} is the most.")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.sequences}x{self.prompt}+{self.output}"

    @property
    def length(self) -> int:
        """Tokens of one sequence when it is finished."""
        return self.prompt + self.output

    @property
    def counts_prompt(self) -> bool:
        """With a single output token it is the prompt that takes the time."""
        return self.output == 1

    @property
    def unit(self) -> str:
        return "prompt tokens/s" if self.counts_prompt else "output tokens/s"

    def rate(self, seconds: float) -> float:
        """Tokens per second, in `unit`, over all sequences."""
        return self.sequences * (self.prompt if self.counts_prompt else self.output) / seconds


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """A list separated by commas.

    Raises:
        UsageError: an entry that is no shape, one that is there twice, or no entry.
    """
    shapes = tuple(Shape.parse(part) for part in text.split(",") if part.strip())
    if not shapes:
        raise UsageError("no shape was given.", hint=f"For example {DEFAULT_SHAPES}.")
    if len(set(shapes)) != len(shapes):
        raise UsageError(f"a shape is in {text!r} twice.")
    return shapes


def random_prompts(shape: Shape, vocab_size: int, seed: str) -> list[TokenIds]:
    """Token ids below ``vocab_size``, the same for the same seed; another seed shares no prefix worth caching."""
    generator = random.Random(f"{seed}/{shape}")
    return [[generator.randrange(vocab_size) for _ in range(shape.prompt)] for _ in range(shape.sequences)]


def timed(generate: Generate, prompts: list[TokenIds], max_tokens: int) -> tuple[float, list[TokenIds]]:
    """Seconds of one call, and its outputs.

    Raises:
        EngineError: an output of another length, which would make the rate a lie.
    """
    start = time.perf_counter()
    outputs = generate(prompts, max_tokens)
    seconds = time.perf_counter() - start
    check_lengths(outputs, len(prompts), max_tokens)
    return seconds, outputs


def check_lengths(outputs: Sequence[TokenIds], sequences: int, max_tokens: int) -> None:
    """Raise `EngineError` unless there are ``sequences`` outputs of exactly ``max_tokens`` tokens."""
    if len(outputs) != sequences:
        raise EngineError(f"{sequences} prompts were given, and {len(outputs)} outputs came.")
    lengths = {len(output) for output in outputs}
    if lengths != {max_tokens}:
        found = " and ".join(map(str, sorted(lengths)))
        raise EngineError(f"{max_tokens} tokens were asked of each sequence, and {found} came.")


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of repeated measurements, with the median and the range they lie in."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_dict(self) -> dict[str, Any]:
        """``{"median", "min", "max", "values"}`` with four significant digits, which is more than they mean."""
        low, high = min(self.values), max(self.values)
        rounded = [_round(value) for value in self.values]
        return {"median": _round(self.median), "min": _round(low), "max": _round(high), "values": rounded}


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def ratios(values: Iterable[float], baseline: Iterable[float]) -> Spread:
    """Each round's value over the baseline's of the same round, so that a slow moment of the machine hits both."""
    return Spread.of(value / base for value, base in zip(values, baseline, strict=True))


def generate_with(llm: LLM) -> Generate:
    """``llm`` as an engine: greedy, past the end-of-sequence token, no text made, no other default of the model."""
    from modelbay_runtime.sampling_params import SamplingParams

    def generate(prompts: list[TokenIds], max_tokens: int) -> list[TokenIds]:
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, repetition_penalty=1.0
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def measure(generate: Generate, shape: Shape, vocab_size: int, *, rounds: int, seed: str) -> Spread:
    """Rates of ``rounds`` runs of a shape, each with new prompts, after one that is not counted."""
    seconds = [timed(generate, random_prompts(shape, vocab_size, f"{seed}/{number}"), shape.output)[0]
               for number in range(rounds + 1)]  # fmt: skip
    return Spread.of(shape.rate(value) for value in seconds[1:])


def check_fits(shapes: Iterable[Shape], max_model_len: int) -> None:
    """Raise `UsageError` for a shape longer than the model."""
    for shape in shapes:
        if shape.length > max_model_len:
            raise UsageError(
                f"shape {shape} has sequences of {shape.length} tokens, and the model's maximum is {max_model_len}.",
                hint="Choose shorter ones with --shapes.",
            )
