"""Files that others wrote: pipes and devices are not opened, and what is too large is not read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelbay.small_files import LIMIT_BYTES, read_bytes, read_text

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX pipes and devices")

READ = """
import sys
from pathlib import Path
from modelbay.small_files import read_bytes

try:
    read_bytes(Path(sys.argv[1]))
except OSError as error:
    print(error.strerror)
"""
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def modelbay(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process with little memory, ended if it waits: a fault must not stop the tests."""
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32)); " + (
        "from modelbay.cli.main import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", limited, *argv],
        env={**os.environ, "MODELBAY_CONFIG": "", "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "f")
    return tmp_path / "f"


def device(tmp_path: Path) -> Path:
    return Path("/dev/zero")


def link(tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to("/dev/full")
    return tmp_path / "link"


NO_FILES = pytest.mark.parametrize("make", [pipe, device, link])
Make = Callable[[Path], Path]


@NO_FILES
def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path, make: Make) -> None:
    done = subprocess.run([sys.executable, "-c", READ, str(make(tmp_path))], capture_output=True, text=True, timeout=60)
    assert done.stdout == "it is no regular file\n"


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1025)
    with pytest.raises(OSError, match="larger than"):
        read_bytes(tmp_path / "f", limit=1024)
    assert len(read_bytes(tmp_path / "f", limit=1025)) == 1025
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)  # no memory could hold it
    with pytest.raises(OSError, match="larger than the 16 MiB"):
        read_text(tmp_path / "huge")
    assert LIMIT_BYTES == 2**24


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux's /proc")
def test_a_file_that_says_it_has_no_size_is_counted() -> None:
    assert read_bytes(Path("/proc/self/maps"))
    with pytest.raises(OSError, match="larger than"):
        read_bytes(Path("/proc/self/maps"), limit=10)


def test_text_is_what_python_reads(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes("a\r\nü\rb".encode("utf-8-sig"))
    assert read_text(tmp_path / "f", encoding="utf-8-sig") == (tmp_path / "f").read_text(encoding="utf-8-sig")
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


# -- everything that a user may name


@NO_FILES
def test_the_trust_record_is_a_regular_file(tmp_path: Path, make: Make) -> None:
    done = modelbay("trust", "list", MODELBAY_TRUST_LOCK=str(make(tmp_path)))
    assert (done.returncode, done.stdout) == (1, "")
    assert "trust record" in done.stderr
    assert "is no regular file" in done.stderr
    assert done.stderr.count("\n") == 1


@NO_FILES
def test_a_lock_is_a_regular_file(tmp_path: Path, make: Make) -> None:
    done = modelbay("explain", "x", "--no-build", "--locked", str(make(tmp_path)))
    assert done.returncode == 2
    assert "cannot read the lock" in done.stderr
    assert "is no regular file" in done.stderr


def test_a_lock_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "modelbay.lock", "wb") as file:
        file.truncate(2**40)
    done = modelbay("explain", "x", "--no-build", "--locked", str(tmp_path / "modelbay.lock"))
    assert done.returncode == 2
    assert "larger than the 16 MiB" in done.stderr


def test_the_config_file_is_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "modelbay").mkdir()
    os.mkfifo(tmp_path / "modelbay" / "config.toml")
    environ = {name: value for name, value in os.environ.items() if name != "MODELBAY_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-m", "modelbay", "config"],
        env={**environ, "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "config.toml: it is no regular file" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [("config.json", "is no regular file"), ("generation_config.json", "")],
)
def test_a_model_with_a_pipe_in_place_of_a_file_never_waits(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    done = modelbay("explain", str(tmp_path), "--no-build")
    assert done.returncode in (0, 1)
    assert said in done.stderr


@NO_FILES
def test_generation_config_and_chat_template_are_regular_files(tmp_path: Path, make: Make) -> None:
    named = make(tmp_path)
    script = f"""
from types import SimpleNamespace
from modelbay.config.generation import _read
from modelbay.tokenizer.chat import _template
from modelbay.errors import ModelbayError

for call in (lambda: _read(None, {str(named)!r}), lambda: _template(SimpleNamespace(), {str(named)!r})):
    try:
        call()
    except ModelbayError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "is no regular file" in first
    assert "neither a template nor a file that can be read" in second
