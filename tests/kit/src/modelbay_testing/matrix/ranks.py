"""The architectures that match in one process, tried on two ranks and in two stages (ranks are threads)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelbay_testing.matrix.cases import Case
from modelbay_testing.matrix.run import Worker, on_workers

#: What a name begins with that a worker is to try on ranks.
PREFIX = "ranks:"
#: Field of the data -> stages and shares. A field's value is `MATCHES`, or the reason why it is refused.
MESHES = {"tp": (1, 2), "pp": (2, 1)}
MATCHES = "matches"
#: Values that are neither a match nor a refusal begin like this: the run fails.
WRONG = ("differs", "fails")
_LENGTHS = (4, 21, 33)
#: Tasks whose cases are tried; a classifier is its encoder's or decoder's layers again.
TASKS = ("generate", "embed")


def attempt_ranks(case: Case, folder: Path) -> dict[str, str]:
    """Field -> outcome, for every mesh; never raises for what a model does."""
    import torch

    from modelbay_testing.matrix.reference import case_config, forward_rows, randomize, reference_model
    from modelbay_testing.tiny import tiny_tokenizer
    from modelbay_testing.tiny_configs import FIRST_MEDIA_ID

    config, _ = case_config(case)
    config.architectures = [case.architecture]
    reference = reference_model(case, config)
    randomize(reference)
    reference.save_pretrained(folder)
    config.save_pretrained(folder)
    tiny_tokenizer(folder)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, FIRST_MEDIA_ID, (n,), generator=generator).tolist() for n in _LENGTHS]
    expected = forward_rows(reference, prompts)
    return {field: _outcome(case, folder, sizes, prompts, expected) for field, sizes in MESHES.items()}


def _outcome(case: Case, folder: Path, sizes: tuple[int, int], prompts: list[list[int]], expected: list[Any]) -> str:
    from modelbay.errors import BackendError, UsageError
    from modelbay_runtime.parallel.mesh import Mesh
    from modelbay_testing.logits import worst_difference
    from modelbay_testing.matrix.attempt import arguments, close, said_by
    from modelbay_testing.parallel import mesh_logits

    mesh = Mesh(pp=sizes[0], tp=sizes[1])
    values = {**arguments(case), "tensor_parallel_size": mesh.tp, "pipeline_parallel_size": mesh.pp}
    decoded = 3 if case.task == "generate" else 0
    try:
        found = mesh_logits(folder, mesh, prompts, decoded=decoded, **values)
    except (BackendError, UsageError) as error:
        return error.message
    except Exception as error:
        return f"fails: {said_by(error)}"
    scale, worst = max(rows.abs().max().item() for rows in expected), worst_difference(found, expected)
    return MATCHES if close(worst, scale) else f"differs by {worst:.1g} of {scale:.3g}"


def run_on_ranks(cases: Iterable[Case], workers: int = 2) -> Iterator[tuple[Case, dict[str, str]]]:
    """What comes out for each case, as they come."""

    def ask(worker: Worker, case: Case) -> tuple[Case, dict[str, str]]:
        answer, reason = worker.ask(PREFIX + case.name)
        return case, json.loads(answer) if answer else dict.fromkeys(MESHES, f"fails: {reason}")

    return on_workers(cases, ask, workers)


def matching_cases(data: Mapping[str, Any], cases: Iterable[Case]) -> list[Case]:
    """The cases that match in one process."""
    matching = {(m["task"], m["model_type"]) for m in data["models"] if m["outcome"] == MATCHES}
    return [case for case in cases if case.task in TASKS and (case.task, case.model_type) in matching]


def keep_ranks(data: dict[str, Any], before: Mapping[str, Any]) -> None:
    """What was found on ranks stays with the models that still match."""
    known = {(m["task"], m["model_type"]): m for m in before["models"]}
    for model in data["models"]:
        old = known.get((model["task"], model["model_type"]), {})
        if model["outcome"] == MATCHES:
            model.update({field: old[field] for field in MESHES if field in old})
