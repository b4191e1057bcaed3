"""The comparison itself: A B A B …, one engine at a time, every number with the others' of the same round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from comparison.processes import EngineSpec, Worker
from modelbay_runtime.bench import Shape, Spread, TokenIds, check_lengths, random_prompts, ratios

Say = Callable[[str], None]

#: A text that every tokenizer can read, for the first token after the start of the process.
START_TEXT = "The capital of France is"


@dataclass(frozen=True)
class Plan:
    """What is compared. ``baseline`` is the name of the engine that the ratios are over."""

    engines: Sequence[EngineSpec]
    baseline: str
    shapes: Sequence[Shape]
    vocab_size: int
    rounds: int
    seed: int = 0
    start: bool = False


@dataclass(frozen=True)
class Run:
    """One measurement: the rate, the cores that were busy with it, and the tokens that came."""

    rate: float
    cores: float
    outputs: list[TokenIds]


def compare(plan: Plan, say: Say) -> dict[str, Any]:
    """Everything that the plan asks for, as data.

    Raises:
        EngineError: an engine could not be loaded, failed, or gave outputs of another length.
    """
    result: dict[str, Any] = {"rounds": plan.rounds, "seed": plan.seed, "baseline": plan.baseline}
    if plan.start:
        result |= compare_starts(plan, say)
    if plan.shapes:
        result |= compare_shapes(plan, say)
    return result


def compare_shapes(plan: Plan, say: Say) -> dict[str, Any]:
    """Load every engine once, then measure shape by shape."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        facts: dict[str, Any] = {}
        for spec in plan.engines:  # one after the other, so that loading times are each engine's own
            worker = stack.enter_context(Worker(spec))
            facts[spec.name] = worker.answer()
            worker.pause()
            workers[spec.name] = worker
            say(f"{spec.name}: loaded in {facts[spec.name]['load_seconds']:.1f} s")
        idle = IdleWatch(workers)
        shapes = [measure_shape(plan, shape, workers, idle, say) for shape in plan.shapes]
    return {"engines": facts, "shapes": shapes, "idle_cpu_share": round(idle.share, 4)}


def measure_shape(plan: Plan, shape: Shape, workers: Mapping[str, Worker], idle: IdleWatch, say: Say) -> dict[str, Any]:
    """Rounds of one shape, after one that is not counted (compilation, caches, memory taken for the first time)."""
    runs: dict[str, list[Run]] = {name: [] for name in workers}
    for number in range(plan.rounds + 1):
        prompts = random_prompts(shape, plan.vocab_size, f"{plan.seed}/{number}")
        for name, worker in workers.items():
            with idle.active(name):
                worker.send(prompts=prompts, max_tokens=shape.output)
                answer = worker.answer()
            check_lengths(answer["outputs"], shape.sequences, shape.output)
            runs[name].append(Run(shape.rate(answer["seconds"]), answer["cores"], answer["outputs"]))
        rates = ", ".join(f"{name} {runs[name][-1].rate:.1f}" for name in workers)
        say(f"{shape} {f'round {number}' if number else 'warm-up'}: {rates} {shape.unit}")
    counted = {name: all_runs[1:] for name, all_runs in runs.items()}
    summaries = summarize({name: [run.rate for run in c] for name, c in counted.items()}, plan.baseline)
    for name, summary in summaries.items():
        summary["cores"] = Spread.of(run.cores for run in counted[name]).to_dict()
        summary["first_tokens"] = agreement(counted[name], counted[plan.baseline])
    return {"shape": str(shape), "unit": shape.unit, "engines": summaries}


def compare_starts(plan: Plan, say: Say) -> dict[str, Any]:
    """Seconds from the start of a fresh process to its first token, text in; the first round is not counted."""
    seconds: dict[str, list[float]] = {spec.name: [] for spec in plan.engines}
    facts: dict[str, Any] = {}
    for number in range(plan.rounds + 1):
        for spec in plan.engines:
            elapsed, facts[spec.name] = start_seconds(spec)
            seconds[spec.name].append(elapsed)
        shown = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items())
        say(f"start {f'round {number}' if number else 'warm-up'}: {shown}")
    counted = {name: values[1:] for name, values in seconds.items()}
    return {"engines": facts, "start": {"unit": "s", "engines": summarize(counted, plan.baseline)}}


def start_seconds(spec: EngineSpec) -> tuple[float, dict[str, Any]]:
    """That, and what the engine says of itself.

    The request waits in the pipe from the beginning, so that nothing but the engine is waited for.
    """
    start = time.perf_counter()
    with Worker(spec) as worker:
        worker.send(text=START_TEXT, max_tokens=1)
        facts = worker.answer()
        outputs = worker.answer()["outputs"]
        elapsed = time.perf_counter() - start
    check_lengths(outputs, 1, 1)
    return elapsed, facts


def summarize(values: Mapping[str, Sequence[float]], baseline: str) -> dict[str, Any]:
    """For each engine its values, and their ratio to the baseline's round by round."""
    return {
        name: {**Spread.of(own).to_dict(), "ratio": ratios(own, values[baseline]).to_dict()}
        for name, own in values.items()
    }


def agreement(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, int]:
    """How many first output tokens are ``equal`` to the baseline's, ``of`` how many: few, if they run other models.

    Seldom all in low precision: on random prompts near ties are common, and rounding decides them.
    """
    pairs = [
        (own[0], other[0])
        for run, base in zip(runs, baseline, strict=True)
        for own, other in zip(run.outputs, base.outputs, strict=True)
    ]
    return {"equal": sum(own == other for own, other in pairs), "of": len(pairs)}


class IdleWatch:
    """Keeps all workers paused but the active one, and counts what the paused ones used all the same.

    ``share`` is the largest share of a core that the others had while one was measured.
    """

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.workers = workers
        self.share = 0.0

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        others = [worker for other, worker in self.workers.items() if other != name]
        before, start = sum(worker.cpu_seconds() for worker in others), time.perf_counter()
        self.workers[name].resume()
        yield
        self.workers[name].pause()
        used = sum(worker.cpu_seconds() for worker in others) - before
        self.share = max(self.share, used / (time.perf_counter() - start))
