"""The engine's thread: nothing blocks it, nothing leaks from it, and what fails ends only what it must."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelbay import LLM, SamplingParams
from modelbay.errors import EngineError

LONG = {"prompt": "The quick brown fox", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


def all_free(server: Any) -> bool:
    free, usable = server.free_blocks()
    return bool(free == usable)


@pytest.mark.parametrize("body", [{}, {"n": 3, "temperature": 1.0}, {"prompt": ["a", "b", "c"]}])
def test_a_client_that_leaves_a_stream_frees_its_blocks(server: Any, body: dict[str, Any]) -> None:
    sent = {**LONG, **body, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=sent, timeout=60) as stream:
        lines = stream.iter_lines()  # kept: a generator that is dropped closes the connection
        next(lines)
        assert server.state.limiter.in_flight == 1
    server.wait_until_idle()
    assert all_free(server)


def test_a_client_that_leaves_before_its_answer_frees_its_blocks(server: Any) -> None:
    """While it waits in the queue, and while its answer is computed."""
    with server.paused(), pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=LONG, timeout=0.3)
    server.wait_until_idle()
    assert all_free(server)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/chat/completions", timeout=0.1,
                   json={"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "n": 100})  # fmt: skip
    server.wait_until_idle()
    assert all_free(server)


def test_the_event_loop_answers_while_the_engine_is_busy(server: Any) -> None:
    with server.paused():
        for path in ("/health", "/v1/models", "/metrics", "/ready"):
            assert httpx.get(server.url + path, timeout=20).status_code == 200


def test_requests_of_many_clients_share_batches_and_are_not_changed_by_it(server: Any, offline: LLM) -> None:
    prompts = [f"Numbers {number} stay apart" for number in range(12)]
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=11)
    expected = [output.outputs[0].text for output in offline.generate(prompts, params, use_tqdm=False)]
    bodies = [{"prompt": prompt, "temperature": 1.0, "max_tokens": 20, "seed": 11} for prompt in prompts]
    with server.paused(), ThreadPoolExecutor(12) as clients:
        answers = [clients.submit(server.post, "/v1/completions", body) for body in bodies]
        server.wait_for(lambda: server.state.limiter.in_flight == 12)
        server.resume()
        texts = [answer.result().json()["choices"][0]["text"] for answer in answers]
    assert texts == expected


def test_a_slow_reader_holds_up_nobody_and_misses_nothing(server: Any) -> None:
    """What it did not read in time is in the next piece that it gets."""
    whole = server.post("/v1/completions", LONG).json()["choices"][0]["text"]
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as slow:
        lines = slow.iter_lines()
        first = next(lines)
        assert server.post("/v1/completions", LONG).json()["choices"][0]["text"] == whole
        rest = [line for line in (first, *lines) if line and line != "data: [DONE]"]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in rest]
    assert "".join(pieces) == whole


def test_an_engine_error_ends_the_request_that_it_names_and_no_other(
    serve: Callable[..., Any], tiny: Path, offline: LLM
) -> None:
    server = serve((tiny, "tiny"))
    expected = server.post("/v1/completions", LONG).json()["choices"][0]["text"]
    failing: list[str] = []

    def break_next(llm: Any) -> None:
        step, engine = llm.engine.step, llm.engine

        def broken() -> Any:
            [name] = [each for each, request in engine.requests.items() if request.prompt == "Hoppelhase"]
            failing.append(name)
            engine.step = step
            engine.scheduler.start_over()
            raise EngineError(f"the model's logits are not usable for request {name!r} (nan).", request_ids=[name])

        engine.step = broken

    with server.paused(), ThreadPoolExecutor() as clients:
        good = clients.submit(server.post, "/v1/completions", LONG)
        bad = clients.submit(server.post, "/v1/completions", {**LONG, "prompt": "Hoppelhase"})
        server.wait_for(lambda: server.state.limiter.in_flight == 2)
        server.loop._inbox.put(lambda: break_next(server.loop._llm))
        server.resume()
        assert bad.result().status_code == 500
        assert bad.result().json()["error"]["code"] == "engine_error"
        assert good.result().json()["choices"][0]["text"] == expected
    assert len(failing) == 1
    assert all_free(server)
    assert server.get("/health").status_code == 200


def test_a_stream_that_fails_says_so_as_its_last_event(serve: Callable[..., Any], tiny: Path) -> None:
    server = serve((tiny, "tiny"))
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.on_engine(lambda llm: poison(llm, math.nan))
        rest = [line for line in lines if line]
    assert '"engine_error"' in rest[-2]
    assert rest[-1] == "data: [DONE]"


def poison(llm: Any, value: float) -> None:
    """Every parameter becomes this number."""
    real = [parameter for parameter in llm.engine.model.parameters() if not parameter.is_mkldnn]
    assert real
    for parameter in real:
        parameter.data.fill_(value)


def test_a_dead_engine_fails_health_and_every_request(serve: Callable[..., Any], tiny: Path) -> None:
    """Requests that wait get an answer too."""
    server = serve((tiny, "tiny"))

    def kill(llm: Any) -> None:
        def broken() -> None:
            raise RuntimeError("the device is gone")

        llm.engine.step = broken

    server.on_engine(kill)
    with ThreadPoolExecutor() as clients:
        answers = [clients.submit(server.post, "/v1/completions", LONG) for _ in range(6)]
        statuses = {answer.result().status_code for answer in answers}
    for _ in range(3):
        statuses.add(server.post("/v1/completions", LONG).status_code)
    assert statuses <= {500, 503}
    server.wait_for(lambda: server.get("/health").status_code == 503)
    refused = server.post("/v1/completions", LONG)
    assert refused.status_code == 503
    assert "the device is gone" not in refused.text
    assert server.get("/ready").status_code == 503
    assert server.state.limiter.in_flight == 0


def test_one_failed_step_kills_nothing(serve: Callable[..., Any], tiny: Path) -> None:
    server = serve((tiny, "tiny"))

    def fail_once(llm: Any) -> None:
        step, engine = llm.engine.step, llm.engine

        def broken() -> None:
            engine.step = step
            raise RuntimeError("out of memory, for once")

        engine.step = broken

    server.on_engine(fail_once)
    assert server.post("/v1/completions", LONG).status_code == 500
    assert server.post("/v1/completions", LONG).status_code == 200
    assert server.get("/health").status_code == 200
    assert all_free(server)


def test_the_end_of_the_server_closes_the_model(
    serving: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    close = LLM.close
    monkeypatch.setattr(LLM, "close", lambda self: (closed.append(self), close(self)))
    with serving((tiny, "tiny")) as server:
        assert server.post("/v1/completions", LONG).status_code == 200
    assert len(closed) == 1
