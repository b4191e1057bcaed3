"""Writes trusted code to where `modelbay.remote_code` finds it. Processes may race; a reader sees all or nothing."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from pathlib import Path

import modelbay.remote_code
from modelbay.remote_code.closure import Closure


def package_name(closure: Closure) -> str:
    """The package of a closure; the same content has the same name everywhere."""
    return f"{modelbay.remote_code.__name__}.{_folder(closure)}"


def _folder(closure: Closure) -> str:
    return f"h{closure.digest()[:40]}"


def store(closure: Closure) -> Path:
    """Make the closure importable and return its directory.

    Where the cache cannot be written, a temporary directory of this process serves; a pickle is then good for this
    process only.
    """
    try:
        directory = _write(closure, modelbay.remote_code.cache_directory())
    except OSError:
        temporary = Path(tempfile.mkdtemp(prefix="modelbay-code-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        directory = _write(closure, temporary)
    search_path = modelbay.remote_code.__path__
    if str(directory.parent) not in search_path:
        search_path.append(str(directory.parent))
    importlib.invalidate_caches()
    return directory


def _write(closure: Closure, parent: Path) -> Path:
    target = parent / _folder(closure)
    if _is_whole(closure, target):
        return target
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=parent, prefix=".staging-"))
    try:
        for name, content in closure.files.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if _is_whole(closure, target):
            return target  # another process was faster: it may be importing from there already
        if target.exists():
            # Not whole: somebody changed it. Out of the way in one step, so that no mixture is ever visible.
            os.rename(target, staging.with_name(f"{staging.name}-old"))
        try:
            os.rename(staging, target)
        except OSError:
            if not _is_whole(closure, target):  # else another process was faster
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(staging.with_name(f"{staging.name}-old"), ignore_errors=True)
    return target


def _is_whole(closure: Closure, target: Path) -> bool:
    """Whether the directory has exactly this code."""
    try:
        python = {path.relative_to(target).as_posix() for path in target.rglob("*.py")}
        return python == set(closure.files) and all(
            (target / name).read_bytes() == content for name, content in closure.files.items()
        )
    except OSError:
        return False
