"""Requests that outlast the time they get when the server ends are told so, in the shape that clients read."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

LONG = {"prompt": "The quick brown fox", "max_tokens": 400, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}


def lines_of(url: str, body: dict[str, Any], begun: threading.Event) -> list[str]:
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        found = []
        for line in response.iter_lines():
            begun.set()
            found += [line] if line else []
    return found


def test_whole_answers_are_503_and_streams_end_with_an_error(
    serving: Callable[..., Any], tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, resume = threading.Event(), threading.Event()
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(4) as clients:
        try:
            with serving((tiny, "tiny"), shutdown_timeout=1) as server:
                streamed = clients.submit(lines_of, server.url + "/v1/completions", LONG, begun)
                assert begun.wait(30)
                server.aio.call_soon_threadsafe(lambda: server.loop.call(lambda llm: resume.wait(60)))
                whole = [
                    clients.submit(server.post, path, body)
                    for path, body in (("/v1/completions", LONG), ("/v1/chat/completions", CHAT))
                ]
                server.wait_for(lambda: server.state.limiter.in_flight == 3)
            responses, lines = [answer.result(30) for answer in whole], streamed.result(30)
        finally:
            resume.set()
    for response in responses:
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "shutting down" in error["message"]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: ")) == {"error": error}
    assert "choices" in json.loads(lines[0].removeprefix("data: "))
    ours = [record for record in caplog.records if record.name.startswith(("modelbay", "uvicorn"))]
    assert not [record for record in ours if record.exc_info or "Traceback" in record.getMessage()]
    assert not [record for record in ours if "ASGI" in record.getMessage()]
    assert any("Cancel" in record.getMessage() for record in ours), "nothing was cancelled"
