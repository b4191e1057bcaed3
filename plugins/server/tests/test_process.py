"""`modelbay serve` as a process of its own: how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from modelbay.cli.main import run
from modelbay_server.serve import _listen
from modelbay_server.settings import ServerSettings
from modelbay_testing.processes import ranks_of
from modelbay_testing.serve_process import serve_process

LONG = {"prompt": "The quick brown fox", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


def test_sigterm_finishes_what_runs_and_takes_nothing_new(tiny: Path) -> None:
    """Under load, with more streams than the engine computes at once; the exit code is 0."""
    with serve_process(str(tiny), "--max-num-seqs", "4") as server, ThreadPoolExecutor(12) as clients:
        server.wait_until_ready()
        expected = httpx.post(server.url + "/v1/completions", json=LONG, timeout=60).json()["choices"][0]["text"]
        began = threading.Semaphore(0)

        def stream() -> str:
            got, last = "", ""
            body = {**LONG, "stream": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=90) as response:
                for number, line in enumerate(response.iter_lines()):
                    if number == 0:
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


def test_what_is_sent_does_not_wait_for_acknowledgements() -> None:
    """The first event of a stream follows the headers at once."""

    async def connect() -> int:
        accepted = asyncio.get_running_loop().create_future()
        with _listen(ServerSettings(port=0)) as listener:
            server = await asyncio.start_server(lambda reader, writer: accepted.set_result(writer), sock=listener)
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                theirs = (await accepted).get_extra_info("socket")
                delay_off = theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                writer.close()
                (await accepted).close()
        return int(delay_off)

    assert asyncio.run(connect())


@pytest.mark.deep
def test_requests_that_outlast_the_shutdown_are_cut_and_the_process_ends(tiny: Path) -> None:
    with serve_process(str(tiny), "--shutdown-timeout", "1") as server:
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
    with serve_process(str(broken)) as server:
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
    with serve_process(str(tiny), MODELBAY_API_KEY="sk-4711") as server:
        server.wait_until_ready()
        assert httpx.get(server.url + "/v1/models").status_code == 401
        assert httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer sk-4711"}).status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
    assert not [line for line in server.lines if "sk-4711" in line or "Traceback" in line]


@pytest.mark.deep
@pytest.mark.parametrize("idle", [False, True])
def test_a_worker_that_is_killed_ends_the_engine_and_is_said(checkpoint: Callable[..., Path], idle: bool) -> None:
    """D3. With two ranks: requests that run hear of it within seconds, /health turns 503, and nobody is left behind."""
    path = str(checkpoint("llama", num_attention_heads=4, num_key_value_heads=2))
    with serve_process(path, "--tensor-parallel-size", "2", "--shutdown-timeout", "5") as server:
        server.wait_until_ready()
        assert httpx.post(server.url + "/v1/completions", json={**LONG, "max_tokens": 4}, timeout=60).is_success
        family = psutil.Process(server.process.pid).children(recursive=True)
        [worker] = ranks_of(server.process.pid)
        if idle:
            worker.kill()
            wait_for(lambda: server.status("/health") == 503)
        else:
            check_running_requests_end(server.url, worker)
        assert "rank 1" in httpx.get(server.url + "/health", timeout=10).text
        assert server.status("/health") == 503
        assert httpx.post(server.url + "/v1/completions", json=LONG, timeout=60).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.lines
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert [line for line in server.lines if "rank 1" in line]
    assert not [line for line in server.lines if "Traceback" in line]


def check_running_requests_end(url: str, worker: psutil.Process) -> None:
    with ThreadPoolExecutor(4) as clients:
        body = {**LONG, "max_tokens": 480, "n": 4, "temperature": 1.0}
        post = partial(clients.submit, httpx.post, url + "/v1/completions", timeout=60)
        streamed, *whole = post(json={**body, "stream": True}), post(json=body), post(json=body)
        running = re.compile(r"^modelbay_sequences_running\{.*\} 12(\.0)?$", re.M)  # all of all three
        wait_for(lambda: bool(running.search(httpx.get(url + "/metrics", timeout=10).text)))
        worker.kill()
        began = time.monotonic()
        assert [answer.result(60).status_code for answer in whole] == [503, 503]
        last = streamed.result(60).text.split("\n\n")[-3]
        assert time.monotonic() - began < 30
    for text in (whole[0].result().text, last):
        assert "model_unavailable" in text
        assert "rank 1" in text


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_arguments_that_do_not_fit_the_model_end_the_command_with_2(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every other command does; which model it was is said too."""
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    assert run(["serve", str(tiny), "--port", "0", "--tensor-parallel-size", "3"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the model ")
    assert "could not be loaded: the model does not divide like this: tensor_parallel_size = 3" in last
