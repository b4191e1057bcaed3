"""Where trusted code is written: what another process wrote meanwhile is used, never moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelbay.remote_code import store as module
from modelbay.remote_code.closure import Closure


def test_a_package_that_another_process_wrote_meanwhile_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 10: it was absent when this process looked, and whole when it was ready to write."""
    closure = Closure({"a.py": b"X = 1\n"})
    target = module._write(closure, tmp_path)
    before = target.stat().st_ino
    answers = iter([False])
    whole = module._is_whole
    monkeypatch.setattr(module, "_is_whole", lambda *args: next(answers, None) is None and whole(*args))
    assert module._write(closure, tmp_path) == target
    assert target.stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
