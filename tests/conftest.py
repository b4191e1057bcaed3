"""What the tests that cross members share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelbay_testing.isolation import build_wheel

ROOT = Path(__file__).resolve().parents[1]

# A stranger's distribution is installed where a test wants it, and never collected here.
collect_ignore = ["third_party"]


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """For tests that compute: threads of parallel test workers would wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def members() -> list[Path]:
    """The folder of every distribution in the checkout, the core's (the root) first."""
    found = [*ROOT.glob("backends/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    return [ROOT, *sorted(path.parent for path in found), ROOT / "tests" / "kit"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``wheel("plugins/llama")``: that project's wheel, built once."""
    folder = tmp_path_factory.mktemp("dist")
    built: dict[str, Path] = {}

    def build(project: str) -> Path:
        if project not in built:
            built[project] = build_wheel(ROOT / project, folder)
        return built[project]

    return build
