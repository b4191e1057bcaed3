"""A model over several ranks, as threads of this process: every rank built, filled from one checkpoint, and run.

Legend: S tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelbay_runtime.api import Step
from modelbay_runtime.build import BuiltModel, build_model
from modelbay_runtime.loading import load_weights
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.mesh import Mesh, Place
from modelbay_testing.ranks import run_ranks
from modelbay_testing.steps import SmallCache

_TIMEOUT_S = 60.0


@dataclass(slots=True)
class RankRun:
    """What one rank leaves: its module, the account of its load, and, on a last stage, the logits of its replica's
    sequences, [S, V] float32 each."""

    built: BuiltModel
    report: Any
    context: ParallelContext
    logits: list[torch.Tensor] | None


def run_mesh(
    path: str | Path, mesh: Mesh, sequences: Sequence[Sequence[int]], *, decoded: int = 3, **arguments: Any
) -> list[RankRun]:
    """Every rank of ``mesh`` on the model at ``path``; what each computed, by rank.

    The last ``decoded`` tokens of each sequence go through the model one by one, those before them at once. Sequence i
    is the replica's whose number is i modulo the replicas: a replica that has none, or none left, takes part in the
    steps of the others with no tokens.

    Args:
        arguments: engine arguments; float32 on the CPU, if they do not say.
    """
    from modelbay import resolve

    def load(context: ParallelContext) -> RankRun:
        resolution = resolve(str(path), **{"dtype": "float32", "device": "cpu", **arguments})
        built = build_model(resolution, context)
        report = load_weights(built.module, resolution, device="cpu", dtype=built.context.dtype)
        return RankRun(built, report, context, None)

    def run(place: Place) -> None:
        mine = [list(ids) for i, ids in enumerate(sequences) if i % mesh.dp == place.dp_rank]
        steps = max((len(ids) > decoded) + min(len(ids), decoded) for ids in sequences)
        rank = ranks[mesh.rank(place)]
        rank.logits = _Stage(rank.built, boundaries).run(mine, decoded, steps)

    boundaries = {
        (dp, stage, tp): queue.Queue[torch.Tensor](1)
        for dp in range(mesh.dp)
        for stage in range(1, mesh.pp)
        for tp in range(mesh.tp)
    }
    ranks = run_ranks(mesh, load)  # all of them, before any waits for what another computes
    run_ranks(mesh, lambda context: run(context.place))
    return ranks


def mesh_logits(
    path: str | Path, mesh: Mesh, sequences: Sequence[Sequence[int]], *, decoded: int = 3, **arguments: Any
) -> list[torch.Tensor]:
    """The logits of every sequence, [S, V] (of a model without a head, its hidden states [S, H]); ranks that share a
    last stage must have the same."""
    found: list[torch.Tensor | None] = [None] * len(sequences)
    for ran in run_mesh(path, mesh, sequences, decoded=decoded, **arguments):
        if ran.logits is None:
            continue
        for number, logits in enumerate(ran.logits):
            index = number * mesh.dp + ran.context.place.dp_rank
            if found[index] is None:
                found[index] = logits
            torch.testing.assert_close(logits, found[index], rtol=0, atol=0)
    assert all(logits is not None for logits in found), "every sequence has a replica"
    return found  # type: ignore[return-value]


class _Stage:
    """One rank's module with a cache, between the stage before it and the one after."""

    def __init__(self, built: BuiltModel, boundaries: dict[tuple[int, int, int], queue.Queue[torch.Tensor]]) -> None:
        self.model, self.parallel, self.specs = built.module, built.context.parallel, built.kv_specs
        self.dtype, self.boundaries = built.context.dtype, boundaries

    def run(self, sequences: list[list[int]], decoded: int, steps: int) -> list[torch.Tensor] | None:
        self.cache = SmallCache(self.specs, [len(ids) for ids in sequences], self.dtype)
        logits: list[list[torch.Tensor]] = [[] for _ in sequences]
        done = [0] * len(sequences)
        for _ in range(steps):
            todo = [(i, self._next(ids, done[i], decoded)) for i, ids in enumerate(sequences) if done[i] < len(ids)]
            todo.sort(key=lambda item: item[1] > 1)  # those with one new token stand first
            found = self._step([(i, sequences[i], done[i], count) for i, count in todo])
            for i, count in todo:
                done[i] += count
                if found is not None:
                    part, found = found[:count], found[count:]
                    logits[i].append(part)
        assert all(done[i] == len(ids) for i, ids in enumerate(sequences))
        return [torch.cat(parts).float() for parts in logits] if self.parallel.is_last_stage else None

    @staticmethod
    def _next(ids: list[int], done: int, decoded: int) -> int:
        return max(1, len(ids) - decoded) if done == 0 else 1

    def _step(self, todo: list[tuple[int, list[int], int, int]]) -> torch.Tensor | None:
        step, input_ids = self._prepare(todo)
        place = self.parallel.place
        if self.parallel.is_first_stage:
            hidden = self.model(input_ids, step.positions, step)
        else:
            received = self.boundaries[place.dp_rank, place.pp_rank, place.tp_rank].get(timeout=_TIMEOUT_S)
            hidden = self.model(None, step.positions, step, inputs_embeds=received)
        if self.parallel.is_last_stage:
            return self.model.logits(hidden) if hasattr(self.model, "logits") else hidden
        self.boundaries[place.dp_rank, place.pp_rank + 1, place.tp_rank].put(hidden.clone(), timeout=_TIMEOUT_S)
        return None

    def _prepare(self, todo: list[tuple[int, list[int], int, int]]) -> tuple[Step, torch.Tensor]:
        ids = [token for _, ids, start, count in todo for token in ids[start : start + count]]
        step = self.cache.step([(number, start, start + count) for number, _, start, count in todo])
        return step, torch.tensor(ids, dtype=torch.int64)
