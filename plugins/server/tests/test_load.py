"""Under load: 64 clients that stream, leave, read slowly and send nonsense. Nothing leaks, no answer changes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import psutil
import pytest

from modelbay import LLM, SamplingParams

CLIENTS = 64
LOAD_SECONDS = float(os.environ.get("MODELBAY_TEST_LOAD_SECONDS", "60"))
NONSENSE = [
    b"", b"{", b"null", b'{"prompt": NaN}', b"[" * 5000, b'{"prompt": 5}', b'{"prompt": "a", "n": -1}',
    b'{"prompt": "\\ud800"}', b'{"model": "gpt-9", "prompt": "a"}', json.dumps({"prompt": [1] * 600}).encode(),
]  # fmt: skip


def cases(offline: LLM) -> list[tuple[dict[str, Any], str]]:
    """Requests, and their answers without a server."""
    made = []
    for number in range(12):
        said = {"temperature": 1.0 if number % 3 else 0.0, "max_tokens": 10 + 8 * (number % 4), "ignore_eos": True}
        prompt = f"The quick brown fox number {number} " * (1 + number % 5)
        [output] = offline.generate(prompt, SamplingParams(seed=number, **said), use_tqdm=False)
        made.append(({"prompt": prompt, "seed": number, **said}, output.outputs[0].text))
    return made


class Load:
    """Clients against one server, for some time."""

    def __init__(self, server: Any, known: list[tuple[dict[str, Any], str]]) -> None:
        self.url = server.url + "/v1/completions"
        self.known = known
        self.done: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._client(client, random.Random(seed), end) for seed in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, draw: random.Random, end: float) -> None:
        actions: list[tuple[str, Callable[..., Any]]] = [
            ("whole", self._whole), ("stream", self._stream), ("leave", self._leave), ("slow", self._slow),
            ("nonsense", self._nonsense),
        ]  # fmt: skip
        first = True
        while first or time.monotonic() < end:
            first = False
            name, action = draw.choice(actions)
            await action(client, draw, *draw.choice(self.known))
            self.done[name] += 1

    async def _whole(self, client: httpx.AsyncClient, draw: random.Random, body: Any, text: str) -> None:
        response = await client.post(self.url, json=body)
        assert response.json()["choices"][0]["text"] == text

    async def _stream(self, client: httpx.AsyncClient, draw: random.Random, body: Any, text: str) -> None:
        async with client.stream("POST", self.url, json={**body, "stream": True}) as response:
            assert "".join([piece async for piece in pieces(response)]) == text

    async def _slow(self, client: httpx.AsyncClient, draw: random.Random, body: Any, text: str) -> None:
        got = ""
        async with client.stream("POST", self.url, json={**body, "stream": True}) as response:
            async for piece in pieces(response):
                await asyncio.sleep(draw.random() / 50)
                got += piece
        assert got == text

    async def _leave(self, client: httpx.AsyncClient, draw: random.Random, body: Any, text: str) -> None:
        after = draw.randrange(8)
        async with client.stream("POST", self.url, json={**body, "stream": True, "n": 1}) as response:
            async for _ in pieces(response):
                after -= 1
                if after <= 0:
                    break

    async def _nonsense(self, client: httpx.AsyncClient, draw: random.Random, body: Any, text: str) -> None:
        content = draw.choice(NONSENSE)
        response = await client.post(self.url, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (400, 404), response.text


async def pieces(response: httpx.Response) -> AsyncIterator[str]:
    assert response.status_code == 200
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event["choices"][0]["text"]


def check_nothing_is_left(server: Any) -> None:
    server.wait_until_idle()
    free, usable = server.free_blocks()
    assert free == usable
    assert not server.on_engine(lambda llm: llm.engine.scheduler.has_work)
    assert not server.loop._entries
    assert server.get("/health").status_code == 200


def test_64_clients_leak_nothing_and_get_what_they_would_get_alone(server: Any, offline: LLM) -> None:
    load = Load(server, cases(offline))
    asyncio.run(load.run(2))
    assert sum(load.done.values()) >= CLIENTS
    check_nothing_is_left(server)


@pytest.mark.deep
@pytest.mark.timeout(2 * LOAD_SECONDS + 300)
def test_64_clients_for_minutes_and_memory_stays_flat(server: Any, offline: LLM) -> None:
    """`MODELBAY_TEST_LOAD_SECONDS` says for how long."""
    load, process = Load(server, cases(offline)), psutil.Process()
    asyncio.run(load.run(max(LOAD_SECONDS / 3, 20)))  # caches fill, and the allocator finds its size
    gc.collect()
    before, files = process.memory_info().rss, process.num_fds()
    load.done.clear()
    asyncio.run(load.run(LOAD_SECONDS))
    check_nothing_is_left(server)
    gc.collect()
    grown = process.memory_info().rss - before
    said = f"{dict(load.done)} in {LOAD_SECONDS:g} s: {grown / 2**20:+.1f} MiB, {process.num_fds() - files:+d} files"
    print(said)
    assert grown < 48 * 2**20, said
    assert process.num_fds() - files < 8, said
    assert min(load.done.values()) > LOAD_SECONDS / 20, said
