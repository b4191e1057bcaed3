"""The commands as processes: Ctrl-C at any time, exit codes, and nothing on standard error that is not ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelbay_testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = ("--prompt", "The quick", "--max-tokens", "3")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("good"), "llama")


ENTRY = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
SLOW_LOAD = (
    "import time, modelbay_runtime.engine.rank as e\n"
    "def load(*args, **kwargs): print('here', flush=True); time.sleep(120)\n"
    "e.load_weights = load\n"
)
#: What a shell sees as 130: an exit with it, or a process that ended itself by the signal, as Python does when the
#: interrupt came while it was executing a string.
INTERRUPTED = (130, -signal.SIGINT)


def start(*argv: str | Path, before: str = "") -> subprocess.Popen[str]:
    """The command in a session of its own. A shell starts background jobs with SIGINT ignored, and we inherit it."""
    code = f"{ENTRY}{before}\nimport modelbay.cli.main as m; m.main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "MODELBAY_CONFIG": "", "OMP_NUM_THREADS": "1"},
    )


def check_interrupted(process: subprocess.Popen[str]) -> list[str]:
    """Exit code, one line, and nothing left of the process's group; the lines before that one."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode in INTERRUPTED
    *before, last = err.splitlines()
    assert last == "interrupted"
    until = time.monotonic() + 10
    while is_alive(process.pid):
        assert time.monotonic() < until, "processes of its group still run"
        time.sleep(0.02)
    return before


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_during_load(good: Path) -> None:
    with start("generate", good, *PROMPT, before=SLOW_LOAD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert check_interrupted(process) == []


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_during_generation(tmp_path: Path) -> None:
    """The text so far stays on standard output."""
    model = tiny_checkpoint(tmp_path, "llama", max_position_embeddings=20_000)
    argv = ["generate", model, "--prompt", "The", "--max-tokens", "19000", "--ignore-eos", "--temperature", "1"]
    with start(*argv) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        (line,) = check_interrupted(process)
        assert line.startswith("KV cache: ")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_while_libraries_are_imported(good: Path) -> None:
    """The import of torch swallows an interrupt or dies of it: ours waits for it."""
    tell = (
        "import sys, threading, time\n"
        "def watch():\n"
        "    while 'torch._C' not in sys.modules: time.sleep(0.001)\n"
        "    print('here', flush=True)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
    )
    with start("generate", good, *PROMPT, before=tell) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert check_interrupted(process) == []


@pytest.mark.parametrize(("argv", "code"), [(["nothing/here/at/all", *PROMPT], 1), (["x", "--max-tokens", "0"], 2)])
def test_a_process_ends_in_one_line_and_the_exit_code(argv: list[str], code: int) -> None:
    if code == 2:
        argv = [argv[0], "--prompt", "a", *argv[1:]]
    with start("generate", *argv) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("error: ")


def test_a_prompt_that_is_too_long_is_one_line_of_a_process_too(good: Path) -> None:
    """Transformers would add a warning of its own."""
    with start("generate", good, "--prompt", "The quick " * 600) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert [line.split(": ")[0] for line in err.splitlines()] == ["KV cache", "error"]
