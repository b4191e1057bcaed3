"""Requests made from the server's own OpenAPI document: whatever fits it, or nearly does, is never a fault of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

#: Of each operation; `deep` takes more.
EXAMPLES, DEEP_EXAMPLES = 4, 150


@pytest.fixture(scope="module")
def small(tiny: Path, serving_in_module: Callable[..., Any]) -> Any:
    """A server whose answers are short: what is asked for at random may be as long as the context."""
    with serving_in_module((tiny, "tiny"), engine={"max_model_len": 48}) as server:
        yield server


def operations(server: Any) -> list[Any]:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    return [operation.ok() for operation in schema.get_all_operations()]


def check(server: Any, examples: int) -> set[int]:
    """Send examples of every operation; the statuses that came."""
    statuses: set[int] = set()
    for operation in operations(server):
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            statuses |= check_operation(server, operation, mode, examples)
    server.wait_until_idle()
    free, usable = server.free_blocks()
    assert free == usable
    assert server.get("/health").status_code == 200
    return statuses


def check_operation(server: Any, operation: Any, mode: Any, examples: int) -> set[int]:
    statuses: set[int] = set()

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(base_url=server.url)
        statuses.add(response.status_code)
        assert response.status_code < 500, f"{case.as_curl_command()}\n{response.text}"

    try:
        send()
    except Unsatisfiable:  # a route without anything that could be wrong
        assert mode is schemathesis.GenerationMode.NEGATIVE
    return statuses


def test_the_document_has_every_route(small: Any) -> None:
    paths = set(small.get("/openapi.json").json()["paths"])
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank",
            "/score", "/v1/score", "/tokenize", "/detokenize", "/v1/models", "/health", "/ready", "/version",
            "/metrics", "/v1/modelbay/explain"} <= paths  # fmt: skip


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_no_request_that_fits_the_document_or_nearly_is_a_fault(small: Any) -> None:
    assert {200, 400} <= check(small, DEEP_EXAMPLES)


def test_a_few_of_them(small: Any) -> None:
    assert {200, 400} <= check(small, EXAMPLES)


METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")


def test_every_method_on_every_path(small: Any) -> None:
    with httpx.Client(base_url=small.url, timeout=60) as client:
        for path in [*small.get("/openapi.json").json()["paths"], "/", "//", "/%00", "/v1/models/%ff%fe", "/..%2f"]:
            for method in METHODS:
                response = client.request(method, path.replace("{name}", "x"))
                assert response.status_code < 500, (method, path, response.text)
