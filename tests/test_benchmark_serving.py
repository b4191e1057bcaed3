"""benchmarks/serving.py: its client, what is made of its numbers, and how they are shown."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay.errors import EngineError, UsageError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def stub() -> Iterator[Any]:
    from comparison.servers import RunningServer
    from comparison.servers import stub as spec

    with RunningServer(spec()) as server:
        yield server


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are paused by POSIX signals")
def test_the_client_reads_whole_answers_and_streams_over_connections_that_it_keeps(stub: Any) -> None:
    from comparison.http_client import Client

    async def ask() -> None:
        client = Client(stub.port)
        wholes = await client.ask_all([stub.body(4)] * 5)
        assert [answer.text for answer in wholes] == [" word"] * 5
        streams = await client.ask_all([{**stub.body(4), "stream": True}] * 5)
        assert [answer.text for answer in streams] == [" word" * 4] * 5
        for answer in streams:
            assert len(answer.arrivals) == 4
            assert answer.first > 0
            assert len(list(answer.gaps())) == 3
        assert len(client._idle) == 5
        await client.close()

    asyncio.run(ask())


def test_a_connection_that_was_closed_after_an_answer_is_replaced() -> None:
    from comparison.http_client import Client

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        said = b'{"choices": [{"text": "a"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(once, "127.0.0.1", 0)
        async with server:
            client = Client(server.sockets[0].getsockname()[1])
            assert [(await client.ask({})).text for _ in range(3)] == ["a"] * 3
        with pytest.raises((EngineError, OSError)):
            await client.ask({})

    asyncio.run(ask())


def test_an_error_is_no_answer() -> None:
    from comparison.http_client import Client

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 5\r\n\r\nno no")
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with server:
            with pytest.raises(EngineError, match="answered 400: no no"):
                await Client(server.sockets[0].getsockname()[1]).ask({})

    asyncio.run(ask())


def measured(rate: float, alone: float, **more: Any) -> Any:
    import serving

    return serving.Measured(rate=[rate, rate * 2], alone=[alone, alone], cores=[2.0, 2.0], **more)


def test_the_summary_says_ratios_and_what_a_server_adds() -> None:
    import serving
    from comparison.report import render

    found = {
        "offline": measured(100, 0.020),
        "modelbay": measured(
            95, 0.023, streamed_rate=[90, 180], first=[0.1, 0.2, 0.3], between=[0.01, 0.02], client_cpu=[5e-5, 5e-5],
            server_cpu={"whole": [1e-5, 1e-5], "streamed": [4e-5, 4e-5]},
        ),
    }  # fmt: skip
    result = serving.summary(found, measured(1, 0.0002))
    assert result["servers"]["modelbay"]["ratio"]["median"] == pytest.approx(0.95)
    assert result["servers"]["modelbay"]["streamed"]["ratio"]["median"] == pytest.approx(0.9)
    assert result["first_token_later_ms"]["median"] == pytest.approx(3.0)
    assert result["server_cpu_us_per_token"]["streamed"]["median"] == pytest.approx(40)
    assert result["within_targets"] == {"ratio": True, "later_ms": True}
    about = {
        "kind": "serving", "shape": "2x3+4", "rounds": 2, "dtype": "float32", "date": "2026-01-01", "commit": "abc",
        "model": {"architecture": "LlamaForCausalLM", "bytes": 10**6},
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "instructions": []},
        "engines": {"offline": {"threads": 2, "versions": {"torch": "2"}}, "modelbay": {"versions": {"uvicorn": "1"}}},
    }  # fmt: skip
    page = render("serving", {**about, **result})
    assert "| `modelbay` | **0.95** (0.95 to 0.95) |" in page or "| `modelbay` | 0.95 |" in page
    assert "**3.0 ms** later" in page
    assert "`modelbay` uvicorn 1" in page


@pytest.mark.parametrize(
    ("servers", "said"),
    [("transformers", "modelbay first"), ("modelbay,llama", "any of"), ("modelbay,vllm", "--vllm-python")],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(servers: str, said: str) -> None:
    import serving

    options = serving.parser().parse_args(["--model", "x", "--servers", servers])
    with pytest.raises(UsageError, match=said):
        serving.server_specs(options)
