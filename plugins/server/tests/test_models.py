"""Several models in one server: loaded when they are asked for, within a limit, the least recently used first out."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from modelbay import LLM, SamplingParams
from modelbay.errors import ModelbayError, UsageError
from modelbay_server.models import resolve_models
from modelbay_server.serve import serve as run_server
from modelbay_server.settings import ModelSource, ServerSettings

ENGINE = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def three(checkpoint: Callable[..., Path]) -> list[tuple[Path, str]]:
    return [(checkpoint("llama", seed=seed), name) for seed, name in ((0, "a"), (1, "b"), (2, "c"))]


def ask(server: Any, name: str) -> Any:
    return server.post("/v1/completions", {"model": name, "prompt": "The quick", "temperature": 0, "max_tokens": 8})


def loaded(server: Any) -> set[str]:
    return {card["id"] for card in server.get("/v1/models").json()["data"] if card["loaded"]}


def limit_for(three: list[tuple[Path, str]], count: int) -> int:
    """Bytes that hold so many of the models, each with a cache of one mebibyte."""
    source = ModelSource(str(three[0][0]), ("x",), {**ENGINE, "kv_cache_memory_bytes": 2**20})
    [model] = resolve_models([source], 2**40)
    return count * model.bytes + 1


def test_each_name_is_answered_by_its_own_model(serve: Callable[..., Any], three: list[tuple[Path, str]]) -> None:
    server = serve(*three)
    assert loaded(server) == {"a"}
    for path, name in three:
        with LLM(str(path), **ENGINE) as llm:
            [expected] = llm.generate("The quick", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        answer = ask(server, name).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected.outputs[0].text)
    assert loaded(server) == {"a", "b", "c"}
    plain = server.post("/v1/completions", {"prompt": "The quick", "temperature": 0, "max_tokens": 8}).json()
    assert plain["model"] == "a"


def test_the_least_recently_used_goes_first(serve: Callable[..., Any], three: list[tuple[Path, str]]) -> None:
    server = serve(*three, engine={"kv_cache_memory_bytes": 2**20}, model_memory=limit_for(three, 2))
    for name, expected in (("b", {"a", "b"}), ("a", {"a", "b"}), ("c", {"a", "c"}), ("b", {"c", "b"})):
        assert ask(server, name).status_code == 200
        assert loaded(server) == expected
    threads = {thread.name for thread in threading.enumerate()}
    assert {"engine-b", "engine-c"} <= threads


def test_a_model_in_use_is_never_taken_away(serve: Callable[..., Any], three: list[tuple[Path, str]]) -> None:
    server = serve(*three, engine={"kv_cache_memory_bytes": 2**20}, model_memory=limit_for(three, 1))
    with server.paused(), ThreadPoolExecutor() as clients:
        first = clients.submit(ask, server, "a")
        server.wait_for(lambda: server.state.limiter.in_flight == 1)
        refused = ask(server, "b")
        assert refused.status_code == 503
        assert "'a' is in use" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        server.resume()
        assert first.result().status_code == 200
    server.wait_for(lambda: server.state.limiter.in_flight == 0)
    assert ask(server, "b").status_code == 200
    assert loaded(server) == {"b"}


def test_what_stays_is_left_out_of_collections(serve: Callable[..., Any], three: list[tuple[Path, str]]) -> None:
    """A heap is settled after every load and every unload."""
    server = serve(*three[:2], engine={"kv_cache_memory_bytes": 2**20}, model_memory=limit_for(three, 1))
    changes: list[str] = []
    server.state.pool.on_load = lambda: changes.append("loaded")
    server.state.pool.on_unload = lambda: changes.append("unloaded")
    for name in "abba":
        assert ask(server, name).status_code == 200
    assert changes == ["unloaded", "loaded"] * 2


def test_the_command_settles_the_heap(three: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is left out of collections by the process that serves."""
    apps: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: apps.append(self.config.app))
    source = ModelSource(str(three[0][0]), ("a",), ENGINE)
    settings = ServerSettings(port=0)
    run_server(settings, resolve_models([source], None))
    [pool] = [app.state.server.pool for app in apps]
    gc.unfreeze()
    try:
        for hook in (pool.on_load, pool.on_unload):
            hook()
            assert gc.get_freeze_count() > 1000
            gc.unfreeze()
    finally:
        gc.unfreeze()


def test_a_model_that_nobody_waits_for_any_more_counts_as_loaded(
    serve: Callable[..., Any], three: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(*three[:2])
    loads, may_go_on, original = [], threading.Event(), LLM.__init__

    def slow(self: LLM, model: str, **kwargs: Any) -> None:
        may_go_on.wait(30)
        original(self, model, **kwargs)

    monkeypatch.setattr(LLM, "__init__", slow)
    server.state.pool.on_load = lambda: loads.append("loaded")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"model": "b", "prompt": "x"}, timeout=0.5)
    server.wait_for(lambda: server.state.limiter.in_flight == 0)
    may_go_on.set()
    assert ask(server, "b").status_code == 200
    assert loads == ["loaded"]


def test_many_who_ask_for_a_model_at_once_load_it_once(
    serve: Callable[..., Any], three: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(*three[:2])
    opened: list[str] = []
    original = LLM.__init__
    monkeypatch.setattr(
        LLM, "__init__", lambda self, model, **kw: (opened.append(model), original(self, model, **kw))[1]
    )
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda _: ask(server, "b"), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert opened == [str(three[1][0])]


def test_a_model_that_cannot_be_loaded_is_503_and_the_others_go_on(
    serve: Callable[..., Any], three: list[tuple[Path, str]], tmp_path: Path
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(three[1][0], broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    server = serve(three[0], (broken, "broken"))
    for _ in range(2):
        assert ask(server, "broken").status_code == 503
    assert ask(server, "a").status_code == 200
    assert server.get("/health").status_code == 200
    assert loaded(server) == {"a"}


def test_what_is_too_large_by_itself_is_refused_before_the_server_starts(three: list[tuple[Path, str]]) -> None:
    source = ModelSource(str(three[0][0]), ("a",), {**ENGINE, "kv_cache_memory_bytes": 2**20})
    with pytest.raises(UsageError, match="--model-memory"):
        resolve_models([source], 1000)
    with pytest.raises(ModelbayError):
        resolve_models([ModelSource("/no/such/model", ("x",))], None)


def test_models_are_described_under_every_name(serve: Callable[..., Any], three: list[tuple[Path, str]]) -> None:
    from modelbay_server.settings import model_sources

    [source] = model_sources([str(three[0][0])], ["x", "y"], ENGINE)
    assert source.names == ("x", "y")
    server = serve(*three[:2])
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["a", "b"]
    assert server.get("/v1/models/b").json()["root"] == str(three[1][0])
    assert {card["max_model_len"] for card in cards} == {512}


def test_explain_says_what_is_served_and_why(serve: Callable[..., Any], three: list[tuple[Path, str]]) -> None:
    server = serve(*three[:2])
    told = server.get("/v1/modelbay/explain", params={"model": "a"}).json()
    assert told["reference"] == str(three[0][0])
    assert told["resolution"]["architecture"] == "LlamaForCausalLM"
    assert told["resolution"]["backend"] == "native"
    assert "commit" in told["resolution"]
    assert told["plugins"]["server"].startswith("modelbay-server")
    stages = {decision["stage"] for decision in told["trace"]}
    assert {"source", "config", "backends", "kernels", "weights", "engine"} <= stages
    other = server.get("/v1/modelbay/explain", params={"model": "b"}).json()
    assert not other["loaded"]
    assert "engine" not in {decision["stage"] for decision in other["trace"]}
