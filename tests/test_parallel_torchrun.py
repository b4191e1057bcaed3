"""The same program under torchrun: on one machine by either rendezvous, and on two that are cut apart (BEHAVIOUR D3).

The two machines are network namespaces with a cable between them, which only root can make.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from modelbay import LLM, SamplingParams
from modelbay_testing.processes import ended, run_to_end
from modelbay_testing.tiny import tiny_checkpoint

_PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
_PROGRAM = """
import sys
from modelbay import LLM, SamplingParams

def main():
    options = dict(dtype="float32", max_model_len=4096, kv_cache_memory_bytes=4 << 20)
    options["distributed_timeout_seconds"] = {timeout}
    with LLM({path!r}, **options, {size}=2) as llm:
        for count in {counts}:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            [output] = llm.generate({prompt!r}, params, use_tqdm=False)
            print("tokens", *output.outputs[0].token_ids, flush=True)

main()
print("only rank 0 comes here", flush=True)
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=8192)


def program(
    folder: Path, llama: Path, *, counts: list[int], timeout: float = 60, size: str = "tensor_parallel_size"
) -> Path:
    file = folder / "run.py"
    text = _PROGRAM.format(path=str(llama), size=size, counts=counts, timeout=timeout, prompt=_PROMPT)
    file.write_text(text)
    return file


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_d3_torchrun_runs_the_same_program(llama: Path, tmp_path: Path, rendezvous: str) -> None:
    with LLM(str(llama), dtype="float32", max_model_len=64) as llm:
        [alone] = llm.generate(_PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    expected = " ".join(map(str, alone.outputs[0].token_ids))
    how = ["--standalone"] if rendezvous == "c10d" else ["--master-addr", "127.0.0.1", "--master-port", "29611"]
    command = torchrun("--nproc-per-node", "2", *how, str(program(tmp_path, llama, counts=[8])))
    done = run_to_end(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"tokens {expected}", "only rank 0 comes here"]


_UNCLOSED = """
from modelbay import LLM, SamplingParams
from modelbay.errors import UsageError

options = dict(dtype="float32", max_model_len=64, kv_cache_memory_bytes=4 << 20, tensor_parallel_size=2)
llm = LLM({path!r}, **options)
[output] = llm.generate({prompt!r}, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
try:
    LLM({path!r}, **options)
except UsageError as error:
    print(error, flush=True)
"""


def test_torchrun_ends_well_without_close_and_serves_one_model(llama: Path, tmp_path: Path) -> None:
    """A script that simply ends has done nothing wrong; a second model would wait for ranks that have one."""
    file = tmp_path / "run.py"
    file.write_text(_UNCLOSED.format(path=str(llama), prompt=_PROMPT))
    command = torchrun("--nproc-per-node", "2", "--standalone", str(file))
    done = run_to_end(command)
    assert done.returncode == 0, done.stderr[-3000:]
    [said] = done.stdout.splitlines()
    assert said.startswith("the processes that torchrun started serve one model")


def test_d1_torchrun_with_another_number_of_processes(llama: Path, tmp_path: Path) -> None:
    command = torchrun("--nproc-per-node", "3", "--standalone", str(program(tmp_path, llama, counts=[8])))
    done = run_to_end(command)
    assert done.returncode != 0
    assert "torchrun started 3 processes, and the arguments ask for 2 ranks" in done.stderr


# ---- two machines --------------------------------------------------------------------------------------------------

_NAMES = ("modelbay-a", "modelbay-b")
_ADDRESSES = ("10.231.7.1", "10.231.7.2")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[None]:
    """Two network namespaces that see each other through one cable."""
    _remove_machines()
    try:
        for name in _NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "mba", "netns", _NAMES[0], "type", "veth", "peer", "name", "mbb", "netns", _NAMES[1])
        for name, link, address in zip(_NAMES, ("mba", "mbb"), _ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _remove_machines()


def _remove_machines() -> None:
    for name in _NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def can_make_machines() -> str | None:
    """Why not, or None."""
    if os.geteuid() or shutil.which("ip") is None:
        return "network namespaces need root and the ip command"
    try:
        with two_machines():
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.decode().strip()}"


def start(machine: int, file: Path, log: Path) -> subprocess.Popen[bytes]:
    how = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(machine)]
    meeting = ["--master-addr", _ADDRESSES[0], "--master-port", "29612"]
    command = ["ip", "netns", "exec", _NAMES[machine], *torchrun(*how, *meeting, str(file))]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.deep
def test_d3_two_machines_and_a_cable_that_is_cut(llama: Path, tmp_path: Path) -> None:
    """Both sides end within the timeout, with an error that says what they waited for, and leave no process."""
    if reason := can_make_machines():
        pytest.skip(reason)
    file = program(tmp_path, llama, counts=[8, *[2000] * 50], timeout=8)
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    with two_machines():
        processes = [start(machine, file, log) for machine, log in enumerate(logs)]
        with ended(processes):
            until = time.monotonic() + 90
            while "tokens" not in logs[0].read_text():
                assert time.monotonic() < until, logs[0].read_text()[-3000:]
                assert processes[0].poll() is None, logs[0].read_text()[-3000:]
                time.sleep(0.1)
            workers = [child for p in processes for child in psutil.Process(p.pid).children(recursive=True)]
            _ip("-n", _NAMES[1], "link", "set", "mbb", "down")
            _, alive = psutil.wait_procs(workers, timeout=45)
            assert not alive, logs[0].read_text()[-3000:]
            assert processes[0].wait(60) != 0
    said = logs[0].read_text()
    assert "EngineError" in said
    assert "only rank 0 comes here" not in said
