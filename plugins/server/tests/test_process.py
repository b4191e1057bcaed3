"""`modelbay serve` as a process of its own: how it starts, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelbay.cli.main import run

LONG = {"prompt": "The quick brown fox", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


class Process:
    """A server, the address that it said, and what it wrote to standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 90
        while True:
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < end, self.lines
            said = re.search(r"listening on (https?://\S+)", "\n".join(self.lines))
            if said:
                self.url = said[1]
                try:
                    if httpx.get(self.url + "/ready", timeout=5).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
            time.sleep(0.1)

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def process(*argv: str, **environ: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "modelbay", "serve", *argv, "--port", "0", "--device", "cpu", "--dtype", "float32"]
    started = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip
    try:
        yield Process(started)
    finally:
        started.kill()
        started.wait()


def test_sigterm_finishes_what_runs_and_takes_nothing_new(tiny: Path) -> None:
    """Under load, with more streams than the engine computes at once; the exit code is 0."""
    with process(str(tiny), "--max-num-seqs", "4") as server, ThreadPoolExecutor(12) as clients:
        server.wait_until_ready()
        expected = httpx.post(server.url + "/v1/completions", json=LONG, timeout=60).json()["choices"][0]["text"]
        began = threading.Semaphore(0)

        def stream() -> str:
            got, last = "", ""
            body = {**LONG, "stream": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=90) as response:
                for line in response.iter_lines():
                    began.release()
                    last = line or last
                    if line.startswith("data: {"):
                        got += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            return got + last

        answers = [clients.submit(stream) for _ in range(8)]
        for _ in range(8):
            assert began.acquire(timeout=60)
        server.process.send_signal(signal.SIGTERM)
        refused = False
        while not all(answer.done() for answer in answers) and not refused:
            try:
                httpx.get(server.url + "/health", timeout=5)
            except httpx.TransportError:
                refused = True
        texts = [answer.result(60) for answer in answers]
        assert server.wait() == 0, server.lines
    assert texts == [expected + "data: [DONE]"] * 8
    assert refused


@pytest.mark.deep
def test_requests_that_outlast_the_shutdown_are_cut_and_the_process_ends(tiny: Path) -> None:
    with process(str(tiny), "--shutdown-timeout", "1") as server:
        server.wait_until_ready()
        body = {**LONG, "n": 100, "temperature": 1.0, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0, server.lines


@pytest.mark.deep
def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    with process(str(broken)) as server:
        assert server.wait() == 1
    assert [line for line in server.lines if line.startswith("error: ") and "model.safetensors" in line]
    assert not [line for line in server.lines if "Traceback" in line]


def test_a_port_in_use_is_said_before_anything_is_loaded(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(["serve", str(tiny), "--port", port]) == 2
    assert f"port {port}" in capsys.readouterr().err


@pytest.mark.deep
def test_a_disk_that_is_full_of_logs_ends_no_request(tiny: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is not there to write to")
    with full.open("w") as stderr, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "modelbay", "serve", str(tiny), "--port", str(port), "--log-requests"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for_url(url + "/ready", server)
            assert (
                httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code
                == 200
            )
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) in (0, 120)  # 120: Python could not flush its own standard error
        finally:
            server.kill()
            server.wait()


def wait_for_url(url: str, server: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        assert server.poll() is None
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} did not answer")


@pytest.mark.deep
def test_the_key_may_come_from_the_environment_and_ctrl_c_ends_it(tiny: Path) -> None:
    with process(str(tiny), MODELBAY_API_KEY="sk-4711") as server:
        server.wait_until_ready()
        assert httpx.get(server.url + "/v1/models").status_code == 401
        assert httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer sk-4711"}).status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
    assert not [line for line in server.lines if "sk-4711" in line or "Traceback" in line]
