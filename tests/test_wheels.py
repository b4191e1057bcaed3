"""Each member stands on its own: its wheel, in a fresh environment that holds only what it declares, imports whole."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay_testing.isolation import fresh_venv

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = [
    ".",
    *sorted(
        str(p.parent.relative_to(ROOT))
        for g in ("backends", "plugins", "tests/kit")
        for p in (ROOT / g).rglob("pyproject.toml")
    ),
]

_IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
assert package.__file__.startswith(sys.prefix), package.__file__
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names), "modules")
"""


def project_table(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def closure(folder: str) -> list[str]:
    """The member and the members it requires, by folder."""
    by_name = {project_table(member)["name"]: member for member in MEMBERS}
    found: list[str] = []
    pending = [folder]
    while pending:
        member = pending.pop()
        if member not in found:
            found.append(member)
            required = [re.match(r"[\w.-]+", text)[0] for text in project_table(member)["dependencies"]]  # type: ignore[index]
            pending += [by_name[name] for name in required if name in by_name]
    return found


@pytest.mark.parametrize("folder", MEMBERS)
def test_member_imports_with_only_its_declared_dependencies(
    folder: str, wheel: Callable[[str], Path], tmp_path: Path
) -> None:
    venv = fresh_venv(tmp_path / "venv", [wheel(member) for member in closure(folder)])
    package = project_table(folder)["name"].replace("-", "_")
    result = venv.run("python", "-W", "error::SyntaxWarning", "-c", _IMPORT_ALL, package)
    assert int(result.stdout.split()[0]) >= 1
    assert "No broken requirements" in venv.pip("check").stdout


def test_core_alone_answers_its_commands_without_the_runtime(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    venv = fresh_venv(tmp_path / "venv", [wheel(".")])
    assert "modelbay 0.1.0" in venv.run("modelbay", "--version").stdout
    assert venv.run("framework", "list-archs", "--json").stdout.strip() == "[]"
    result = venv.run("python", "-c", "import modelbay; modelbay.LLM", check=False)
    assert result.returncode == 1
    assert "ImportError: modelbay.LLM needs the runtime: pip install modelbay-runtime" in result.stderr


def test_wheels_hold_their_package_and_nothing_else(wheel: Callable[[str], Path]) -> None:
    """The root's wheel must not ship the whole checkout, nor carry the package as ``core.modelbay``."""
    import zipfile

    for folder in MEMBERS:
        package = project_table(folder)["name"].replace("-", "_")
        tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel(folder)).namelist()}
        assert tops == {package, f"{package}-0.1.0.dist-info"}, folder
