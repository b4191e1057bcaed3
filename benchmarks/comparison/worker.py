"""A process that holds one engine: ``python -m comparison.worker '{"target": "module:Class", …}'``.

One JSON object a line: requests come on standard input, answers go out on what was standard output. Whatever the
libraries print goes to standard error instead. The first answer is sent when the engine is loaded. Standard library
only, since it runs under the interpreter of the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

from comparison.engines import Engine, make_engine


def main() -> None:
    channel = private_stdout()
    settings = json.loads(sys.argv[1])
    start = time.perf_counter()
    try:
        engine = make_engine(settings.pop("target"), **settings)
        answer = {"load_seconds": time.perf_counter() - start, **engine.facts()}
    except Exception as error:
        send(channel, failure(error))
        raise  # the traceback goes to standard error
    send(channel, answer)
    for line in sys.stdin:
        send(channel, answer_to(engine, json.loads(line)))


def private_stdout() -> TextIO:
    """Standard output for us alone: file descriptor 1 becomes standard error for everybody else."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def send(channel: TextIO, answer: dict[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


def failure(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def answer_to(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """What one request took and gave: ``prompts`` as token ids, or one ``text``.

    ``cores`` is the processor time of all threads over the time that passed.
    """
    start, cpu = time.perf_counter(), time.process_time()
    try:
        if "text" in request:
            outputs = [engine.generate_text(request["text"], request["max_tokens"])]
        else:
            outputs = engine.generate(request["prompts"], request["max_tokens"])
    except Exception as error:
        return failure(error)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cores": (time.process_time() - cpu) / seconds, "outputs": outputs}


if __name__ == "__main__":
    main()
