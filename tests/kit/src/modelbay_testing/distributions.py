"""Throwaway distributions for tests of discovery: as files on a path, or as a wheel that pip installs."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_WHEEL = "Wheel-Version: 1.0\nGenerator: modelbay-testing\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_distribution(
    folder: Path,
    name: str,
    modules: Mapping[str, str],
    *,
    version: str = "1.0",
    entry_points: Mapping[str, str] | None = None,
    group: str = "modelbay",
) -> Path:
    """Lay a distribution out in ``folder`` as pip would, and return ``folder``.

    Args:
        modules: file name (``"acme_plugin.py"``) to source; indentation is taken off.
        entry_points: name to target, in ``group``; by default the distribution's last word names its first module.
    """
    for path, text in _files(name, modules, version, entry_points, group).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def write_wheel(
    folder: Path,
    name: str,
    modules: Mapping[str, str],
    *,
    version: str = "1.0",
    entry_points: Mapping[str, str] | None = None,
    group: str = "modelbay",
) -> Path:
    """The same as a wheel in ``folder``; returns its path."""
    files = _files(name, modules, version, entry_points, group)
    info = _dist_info(name, version)
    files[f"{info}/WHEEL"] = _WHEEL
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def see_only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Let distributions be found in these folders and nowhere else, in this order."""
    finder = importlib.metadata.MetadataPathFinder()
    context = importlib.metadata.DistributionFinder.Context(path=[str(folder) for folder in folders])
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: list(finder.find_distributions(context)))


def _files(
    name: str, modules: Mapping[str, str], version: str, entry_points: Mapping[str, str] | None, group: str
) -> dict[str, str]:
    if entry_points is None:
        entry_points = {name.rpartition("-")[2]: next(iter(modules)).removesuffix(".py")}
    points = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    info = _dist_info(name, version)
    return {
        **{path: dedent(source) for path, source in modules.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/entry_points.txt": f"[{group}]\n{points}",
    }


def _dist_info(name: str, version: str) -> str:
    return f"{name.replace('-', '_')}-{version}.dist-info"


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
