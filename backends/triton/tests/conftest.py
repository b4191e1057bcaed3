"""How these tests run, and the paged cases they share.

On a CUDA machine the kernels are compiled, in this process. Elsewhere they are interpreted, and Triton decides that
when it is imported (Transformers imports it too). So unless TRITON_INTERPRET was set from the start, the tests of one
file run in a pytest process of their own, started when the first of them is due, and each reports here what it did
there. The environment of this process stays as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from modelbay_runtime.kernels.attention import AttentionSpec
from modelbay_runtime.step import KVGroupStep, Step
from modelbay_triton.availability import interpreter_requested

_REPORT = "MODELBAY_TRITON_TEST_REPORT"
#: Test file -> node id -> (outcome, text); "" -> what the process printed.
_RESULTS: pytest.StashKey[dict[Path, dict[str, tuple[str, str]]]] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Where this process cannot run the kernels: the other process's result instead of a call."""
    if interpreter_requested() or torch.cuda.is_available():
        return None
    files = pyfuncitem.config.stash.setdefault(_RESULTS, {})
    if pyfuncitem.path not in files:
        files[pyfuncitem.path] = _run_interpreted(pyfuncitem)
    results = files[pyfuncitem.path]
    outcome, text = results.get(pyfuncitem.nodeid, results[""])
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    return True


def _run_interpreted(due: pytest.Function) -> dict[str, tuple[str, str]]:
    """The selected tests of this test's file."""
    config = due.config
    selected = [item.nodeid for item in due.session.items if item.path == due.path]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
    ini = ["-c", str(config.inipath)] if config.inipath else []
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.jsonl")
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [*command, *ini, *selected],
            cwd=config.rootpath,
            env={**env, "TRITON_INTERPRET": "1", _REPORT: str(report)},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = report.read_text().splitlines() if report.exists() else []
    results = {"": ("failed", f"no report from the interpreting process:\n{done.stdout}{done.stderr}")}
    for nodeid, outcome, text in map(json.loads, lines):
        if outcome != "passed" or nodeid not in results:
            results[nodeid] = (outcome, text)
    return results


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the other process: one line for each phase that failed or was skipped, and for each call."""
    if _REPORT in os.environ and (report.when == "call" or report.outcome != "passed"):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        with open(os.environ[_REPORT], "a") as file:
            file.write(json.dumps((report.nodeid, report.outcome, text)) + "\n")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Paged:
    """The arguments of one attention call. What no sequence owns in ``cache`` is NaN."""

    q: torch.Tensor
    rows: torch.Tensor
    cache: torch.Tensor
    step: Step
    group: KVGroupStep
    spec: AttentionSpec
    sinks: torch.Tensor | None

    def arguments(self) -> tuple:
        return self.q, self.rows, self.cache, self.step, self.group, self.spec, self.sinks

    def in_float32(self) -> Paged:
        """The same numbers for the torch reference, which wants no NaN and fills its own scratch."""
        sinks = None if self.sinks is None else self.sinks.float()
        cache = self.cache.float().nan_to_num()
        group, step = replace(self.group, scratch={}), replace(self.step, scratch={})
        return Paged(self.q.float(), self.rows.float(), cache, step, group, self.spec, sinks)


@pytest.fixture
def make_paged(device: torch.device) -> Callable[..., Paged]:
    return lambda lengths, **options: paged(lengths, device=device, **options)


def paged(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    page: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    slid: bool = False,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
) -> Paged:
    """A random case.

    Args:
        lengths: (new tokens, length including them) of each sequence.
        heads, sizes: (N, K) and (D, E).
        slid: blocks that fell out of the window are gone from the tables.
        padding: unused elements behind each row of the cache.
    """
    generator = torch.Generator().manual_seed(len(lengths) + sum(heads) + sum(sizes) + page)
    spec = AttentionSpec(*heads, *sizes, scale=sizes[0] ** -0.5, window=window, softcap=softcap)
    width = heads[1] * sum(sizes)
    firsts = [max(0, total - new + 1 - window) // page * page if slid and window else 0 for new, total in lengths]
    counts = [-(-(total - first) // page) for (_, total), first in zip(lengths, firsts, strict=True)]
    ids = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    cache = torch.full((len(ids), page, width + padding), float("nan"))[..., :width]
    tables = torch.full((len(lengths), max(counts) + 1), ids.pop(), dtype=torch.int32)
    slots, rows, positions = [], [], []
    for index, ((new, total), first, count) in enumerate(zip(lengths, firsts, counts, strict=True)):
        tables[index, :count] = torch.tensor([ids.pop() for _ in range(count)])
        places = torch.arange(total - first)
        own = tables[index].long()[places // page] * page + places % page
        content = torch.randn(total - first, width, generator=generator)
        cache.flatten(0, 1)[own] = content
        slots.append(own[-new:])
        rows.append(content[-new:])
        positions.append(torch.arange(total - new, total))
    news, totals = [new for new, _ in lengths], [total for _, total in lengths]
    decodes = next((i for i, new in enumerate(news) if new != 1), len(news))
    step = Step(
        positions=torch.cat(positions).to(device),
        query_start=torch.tensor([0, *news]).cumsum(0).to(device, torch.int32),
        seq_lens=torch.tensor(totals, dtype=torch.int32, device=device),
        query_lens=news,
        context_lens=totals,
        num_decodes=decodes,
    )
    first_position = torch.tensor(firsts, dtype=torch.int32, device=device)
    group = KVGroupStep(torch.cat(slots).to(device), tables.to(device), first_position, page)
    # As in a model: queries are a slice of a wider product.
    product = torch.randn(sum(news), heads[0] + heads[1], sizes[0], generator=generator).to(device, dtype)
    sink = torch.randn(heads[0], generator=generator).to(device, dtype) if sinks else None
    backing = torch.full((len(cache), page, width + padding), float("nan"), dtype=dtype, device=device)
    backing[..., :width] = cache.to(device)
    return Paged(
        product[:, : heads[0]], torch.cat(rows).to(device, dtype), backing[..., :width], step, group, spec, sink
    )
