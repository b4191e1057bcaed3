"""D2 for custom models: over several ranks they compute what their own code computes in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay_runtime.parallel.mesh import Mesh
from modelbay_testing.logits import worst_difference
from modelbay_testing.parallel import mesh_logits, run_mesh

SEQUENCES = [[1, 6, 7, 8], list(range(9, 42)), list(range(100, 121))]


def arguments(mesh: Mesh) -> dict[str, Any]:
    return {
        "trust_remote_code": True, "dtype": "float32", "device": "cpu", "tensor_parallel_size": mesh.tp,
        "pipeline_parallel_size": mesh.pp, "enable_expert_parallel": mesh.expert_parallel,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, mesh) for name in ("lumen", "hive", "grove") for mesh in (Mesh(tp=2), Mesh(pp=2))),
        *((name, Mesh(tp=2, expert_parallel=True)) for name in ("hive", "grove")),
    ],
    ids=str,
)
def test_d2_logits_over_ranks_are_those_of_the_repositorys_own_code(
    name: str, mesh: Mesh, checkpoint: Callable[[str], Path], reference: Callable[[str], Any]
) -> None:
    found = mesh_logits(checkpoint(name), mesh, SEQUENCES, **arguments(mesh))
    expected = [reference(name).logits(ids) for ids in SEQUENCES]
    assert worst_difference(found, expected) <= 1e-4


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=2)], ids=str)
def test_d2_an_encoder_over_ranks(
    mesh: Mesh, checkpoint: Callable[[str], Path], reference: Callable[[str], Any]
) -> None:
    found = mesh_logits(checkpoint("quill"), mesh, SEQUENCES, decoded=0, **arguments(mesh))
    assert worst_difference(found, [reference("quill").hidden(ids) for ids in SEQUENCES]) <= 1e-4


def test_case37_experts_in_a_list_are_each_on_one_rank(checkpoint: Callable[[str], Path]) -> None:
    mesh = Mesh(tp=2, expert_parallel=True)
    held: list[set[str]] = []
    for run in run_mesh(checkpoint("hive"), mesh, SEQUENCES[:1], **arguments(mesh)):
        names = [name for name, _ in run.built.module.named_parameters() if ".experts." in name]
        held.append({name.split(".experts.")[1].split(".")[0] for name in names})
    assert held[0]
    assert not held[0] & held[1]
    assert {len(numbers) for numbers in held} == {len(held[0])}
