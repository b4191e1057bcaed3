"""The feature table: every cell works, is refused by name, or changes nothing; and the page says the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay import PoolingParams, SamplingParams
from modelbay.errors import UsageError
from modelbay_testing.features.checks import CHECKS
from modelbay_testing.features.models import Models
from modelbay_testing.features.page import PAGE, render
from modelbay_testing.features.requests import REQUESTS
from modelbay_testing.features.table import COLUMNS, ROWS, Cell, NoEffect, Refused, Row, Works

pytestmark = pytest.mark.usefixtures("one_thread")


def cells(*kinds: type[Any]) -> Iterator[Any]:
    for row in ROWS:
        for column in COLUMNS:
            cell: Cell = row.cell(column)
            if isinstance(cell, kinds):
                marks = [pytest.mark.deep] if isinstance(cell, Works) and cell.deep else []
                yield pytest.param(row, column, cell, id=f"{row.feature}-{column}", marks=marks)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize(("row", "column", "cell"), cells(Works))
def test_it_works(row: Row, column: str, cell: Works, models: Models) -> None:
    CHECKS[row.feature](models.get(column, cell.of), True)


@pytest.mark.parametrize(("row", "column", "cell"), cells(NoEffect))
def test_it_changes_nothing(row: Row, column: str, cell: NoEffect, models: Models) -> None:
    CHECKS[row.feature](models.get(column), False)


@pytest.mark.parametrize(("row", "column", "cell"), cells(Refused))
def test_it_is_refused_by_name(row: Row, column: str, cell: Refused, models: Models, tmp_path: Path) -> None:
    with pytest.raises(cell.error, match=re.escape(cell.says)):
        REQUESTS[row.feature](models.get(column), tmp_path)


@pytest.mark.parametrize("column", ["native", "media"])
@pytest.mark.parametrize("feature", ["expert parallel", "speculation"])
def test_where_another_model_shows_it_the_columns_own_refuses(
    feature: str, column: str, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"the model has no experts|has no layer to draft with"):
        REQUESTS[feature](models.get(column), tmp_path)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "stop", "n", "structured_outputs"])
def test_what_generation_alone_has_is_no_parameter_of_pooling(name: str) -> None:
    with pytest.raises(UsageError, match=f"PoolingParams has no parameter '{name}'"):
        PoolingParams(**{name: 1})


@pytest.mark.parametrize("call", ["embed", "encode", "score"])
def test_sampling_parameters_are_none_for_pooling(call: str, models: Models) -> None:
    texts = ("a", "b") if call == "score" else ("a",)
    with models.get("encoder").open() as llm, pytest.raises(UsageError, match="pooling parameters are PoolingParams"):
        getattr(llm, call)(*texts, SamplingParams(logprobs=1))


def test_every_row_has_a_cell_that_is_always_run() -> None:
    for row in ROWS:
        found = [row.cell(column) for column in COLUMNS]
        assert not all(isinstance(cell, Works) and cell.deep for cell in found), row.feature
        assert any(isinstance(cell, Works) for cell in found) == bool(row.shown), row.feature


def test_the_page_is_what_the_table_gives(root: Path) -> None:
    assert (root / PAGE).read_text(encoding="utf-8") == render(), "run make features"
