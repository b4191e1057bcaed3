"""Servers on tiny checkpoints: real sockets, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from modelbay import LLM
from modelbay_server.app import create_app
from modelbay_server.engine_loop import EngineLoop
from modelbay_server.models import resolve_models
from modelbay_server.serve import _listen, uvicorn_config
from modelbay_server.settings import ModelSource, ServerSettings
from modelbay_server.state import ServerState
from modelbay_testing.tiny import tiny_checkpoint, tiny_tokenizer

ENGINE = {"dtype": "float32", "device": "cpu", "max_num_seqs": 16}
#: A template with a place for tools, and for a variable of its own.
TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}"
    "<tool_call>{% endif %}{% if shout %}LOUD {% endif %}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['arguments']['city'] }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Server:
    """A server that runs, and the way into it from a test's thread."""

    url: str
    state: ServerState
    aio: asyncio.AbstractEventLoop
    _go: threading.Event = field(default_factory=threading.Event)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a streamed answer, which must end with ``[DONE]``."""
        response = self.post(path, {**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", lines
        return [json.loads(line) for line in lines[:-1]]

    @staticmethod
    def text(events: Sequence[Any], index: int = 0) -> str:
        """What a streamed answer says in one choice."""
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **more)

    @property
    def loop(self) -> EngineLoop:
        loop = self.state.pool.models[0].loop
        assert loop is not None
        return loop

    def on_engine(self, fn: Callable[[LLM], Any]) -> Any:
        """``fn(llm)`` on the engine's thread."""
        return asyncio.run_coroutine_threadsafe(self._call(fn), self.aio).result(60)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine's thread stands still until `resume`, or the end of the block."""
        self._go = threading.Event()
        asyncio.run_coroutine_threadsafe(self._call(lambda llm: self._go.wait(60)), self.aio)
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        self._go.set()

    @staticmethod
    def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
        wait_for(condition, seconds)

    async def _call(self, fn: Callable[[LLM], Any]) -> Any:
        return await self.loop.call(fn)

    def wait_until_idle(self) -> None:
        """Until no request is anywhere; fails after some seconds."""
        wait_for(lambda: self.state.limiter.in_flight == 0 and not self.on_engine(lambda llm: llm.engine.requests))

    def free_blocks(self) -> tuple[int, int]:
        """Free blocks of the KV cache, and all of them."""
        pool = self.on_engine(lambda llm: llm.engine.kv.pool)
        return pool.num_free, pool.num_usable


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


@contextmanager
def running(app: Any, settings: ServerSettings) -> Iterator[Server]:
    """``app`` under uvicorn on a free port, until the block ends."""
    listener = _listen(ServerSettings(port=0))
    server = uvicorn.Server(uvicorn_config(app, settings))
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        scheme = "https" if settings.ssl_certfile else "http"
        yield Server(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", app.state.server, loops[0])
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def serving(
    *checkpoints: Path | tuple[Path, str], wait: bool = True, page: Path | None = None,
    engine: dict[str, Any] | None = None, **settings: Any,
) -> Iterator[Server]:  # fmt: skip
    """A server for these checkpoints (each under its own name, if one is given), its first model loaded."""
    given = [item if isinstance(item, tuple) else (item, str(item)) for item in checkpoints]
    sources = [ModelSource(str(path), (name,), {**ENGINE, **(engine or {})}) for path, name in given]
    set_up = ServerSettings(**{"shutdown_timeout": 5.0, **settings})
    more: dict[str, Any] = {} if page is None else {"page": page}
    with running(create_app(set_up, resolve_models(sources, set_up.model_memory), **more), set_up) as server:
        if wait:
            wait_for(lambda: next(server.state.pool.snapshots(), None) is not None)
        yield server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("llama", seed=1)``: a tiny checkpoint, made once."""
    made: dict[Any, Path] = {}

    def make(model_type: str = "llama", **values: Any) -> Path:
        key = (model_type, repr(sorted(values.items())))
        if key not in made:
            made[key] = tiny_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **values)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    """A server for the tiny checkpoint, under the name "tiny", shared by the tests of a module."""
    with serving((tiny, "tiny")) as server:
        yield server


@pytest.fixture(scope="session")
def offline(tiny: Path) -> Iterator[LLM]:
    """The same model without a server: what answers are compared with."""
    with LLM(str(tiny), **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="session")
def tool_template() -> str:
    return TOOL_TEMPLATE


@pytest.fixture(scope="module")
def serving_in_module() -> Callable[..., Any]:
    return serving


@pytest.fixture(scope="module")
def with_template(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint with another chat template."""

    def make(template: str) -> Path:
        path = tmp_path_factory.mktemp("template") / "model"
        shutil.copytree(checkpoint("llama"), path)
        for file in path.glob("chat_template*"):
            file.unlink()
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        return path

    return make


@pytest.fixture(scope="module")
def tool_server(
    with_template: Callable[[str], Path], tool_template: str, serving_in_module: Callable[..., Any]
) -> Iterator[Any]:
    """A server for the tiny checkpoint with a template that has a place for tools, under the name "tools"."""
    with serving_in_module((with_template(tool_template), "tools")) as server:
        yield server


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a token for every byte: what it says is full of parts of characters."""
    path = tmp_path_factory.mktemp("bytes")
    tiny_checkpoint(path, vocab_size=300, tokenizer=False)
    return tiny_tokenizer(path, vocab_size=300, chat_template=TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def byte_server(byte_checkpoint: Path) -> Iterator[Server]:
    with serving((byte_checkpoint, "bytes")) as server:
        yield server


@pytest.fixture(name="serving")
def serving_fixture() -> Callable[..., Any]:
    """`serving`, for a server that ends before the test does."""
    return serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """``serve((path, "name"), api_key="…")``: a server that ends with the test."""
    with ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(serving(*given, **more))
