"""A client for completions over HTTP that costs little: what it takes is taken from the server's two cores.

Bare asyncio, one connection per running request, kept for the next one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from modelbay.errors import EngineError

#: Bytes of one line or one chunk.
_LIMIT = 2**22
_TIMEOUT_S = 600.0


@dataclass
class Answer:
    """One request's. Seconds on the clock of `time.perf_counter`.

    Attributes:
        arrivals: of each piece of text, for a stream; of the whole, for none.
        tokens: that the server says it generated; None where it does not say.
    """

    began: float
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int | None = None

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0] - self.began

    def gaps(self) -> Iterator[float]:
        """Seconds between pieces."""
        yield from (after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False))


class Client:
    """Args:
    port: of a server on this machine. path: of the route.
    """

    def __init__(self, port: int, path: str = "/v1/completions") -> None:
        self._port, self._path = port, path
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """Send one request and read all of the answer.

        Raises:
            EngineError: the answer is an error, or the server closes the connection instead.
        """
        while True:
            kept = len(self._idle)
            try:
                return await self._ask(body)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if not kept:  # else it may have been closed in the moment in which it was used again
                    raise EngineError("the server closed the connection without an answer.") from error

    async def _ask(self, body: Mapping[str, Any]) -> Answer:
        payload = json.dumps(body).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        async with self._connection() as (reader, writer), asyncio.timeout(_TIMEOUT_S):
            answer = Answer(time.perf_counter())
            writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            status, headers = await _head(reader)
            body_parts = _body(reader, headers)
            if status != 200:
                said = b"".join([part async for part in body_parts])
                raise EngineError(f"the server answered {status}: {said[:300].decode(errors='replace')}")
            await (_stream(answer, body_parts) if body.get("stream") else _whole(answer, body_parts))
        return answer

    async def ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """All at once."""
        return await asyncio.gather(*(self.ask(body) for body in bodies))

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        while self._idle and self._idle[-1][0].at_eof():  # the server does not keep it for ever
            self._idle.pop()[1].close()
        made = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port, limit=_LIMIT)
        try:
            yield made
        except BaseException:
            made[1].close()
            raise
        self._idle.append(made)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    pairs = (line.partition(b":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    if headers.get(b"transfer-encoding") != b"chunked":
        yield await reader.readexactly(int(headers[b"content-length"]))
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


async def _whole(answer: Answer, parts: AsyncIterator[bytes]) -> None:
    value = json.loads(b"".join([part async for part in parts]))
    answer.arrivals.append(time.perf_counter())
    answer.text = value["choices"][0]["text"]
    answer.tokens = (value.get("usage") or {}).get("completion_tokens")


async def _stream(answer: Answer, parts: AsyncIterator[bytes]) -> None:
    held = b""
    async for part in parts:
        *events, held = (held + part).split(b"\n\n")
        now = time.perf_counter()
        for event in events:
            data = event.removeprefix(b"data: ")
            if not data.startswith(b"{"):
                continue
            value = json.loads(data)
            if "error" in value:
                raise EngineError(f"the server ended a stream with {value['error']}")
            if text := "".join(choice.get("text") or "" for choice in value["choices"]):
                answer.text += text
                answer.arrivals.append(now)
            answer.tokens = (value.get("usage") or {}).get("completion_tokens", answer.tokens)
