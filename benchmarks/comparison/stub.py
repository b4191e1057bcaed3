"""A server that knows all answers beforehand: ``python -m comparison.stub --port N``."""

from __future__ import annotations

import asyncio
import json
import sys

_EVENT = json.dumps({"id": "cmpl-0", "object": "text_completion", "choices": [{"index": 0, "text": " word"}]}).encode()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                continue
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
            if body.get("stream"):
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for event in [_EVENT] * body["max_tokens"] + [b"[DONE]"]:
                    data = b"data: " + event + b"\n\n"
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_EVENT), _EVENT))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main(port: int) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[sys.argv.index("--port") + 1])))
