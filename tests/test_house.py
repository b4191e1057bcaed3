"""The rules of the house that no single member can check: who imports whom, and that every member looks the same."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from typing import Any

import pytest

from modelbay.registration import read_plugin
from modelbay.registry import TABLES

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [
    ".",
    *sorted(
        str(p.parent.relative_to(ROOT))
        for g in ("backends", "plugins", "tests/kit")
        for p in (ROOT / g).rglob("pyproject.toml")
    ),
]
MEMBERS = FOLDERS[1:]
PLUGINS = [folder for folder in MEMBERS if folder != "tests/kit"]

#: What core may import at module level, besides the standard library and itself: light, and declared.
LIGHT = {"click", "huggingface_hub", "jinja2", "pluggy", "rich", "safetensors"}

#: Files that may be longer than 400 lines, each with the reason.
LONG_FILES: dict[str, str] = {}


def project_table(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def package_dir(folder: str) -> Path:
    name = project_table(folder)["name"].replace("-", "_")
    return ROOT / "core" / name if folder == "." else ROOT / folder / "src" / name


def source_files(folder: str) -> list[Path]:
    return sorted(package_dir(folder).rglob("*.py"))


def imports(tree: ast.AST, *, lazy: bool) -> Iterator[tuple[str, int]]:
    """Top-level names of the modules a file imports, with the line; ``lazy`` includes those inside functions.
    What stands under ``if TYPE_CHECKING`` never runs and is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0], node.lineno
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, lazy=lazy)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def distributions_of(package: str) -> set[str]:
    own = {package_dir(folder).name: project_table(folder)["name"] for folder in FOLDERS}  # editable: not in the index
    return {own[package]} if package in own else {canonical(name) for name in packages_distributions().get(package, [])}


def test_import_contracts() -> None:
    """Who may import whom, as written down for import-linter."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_contracts_name_every_member() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    packages = {package_dir(folder).name for folder in (".", *PLUGINS)}
    assert set(linter["root_packages"]) == packages
    by_type = {contract["name"]: contract for contract in linter["contracts"]}
    core = next(c for c in by_type.values() if c.get("source_modules") == ["modelbay"])
    assert packages - {"modelbay"} <= set(core["forbidden_modules"])
    independent = next(c for c in by_type.values() if c["type"] == "independence")
    assert set(independent["modules"]) == packages - {"modelbay", "modelbay_runtime"}


def test_core_imports_nothing_heavy_at_module_level() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files(".")
        for name, line in imports(ast.parse(path.read_text(encoding="utf-8")), lazy=False)
        if name not in LIGHT | {"modelbay"} and name not in sys.stdlib_module_names
    ]
    assert not found, found


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_import_is_declared(folder: str) -> None:
    """Also those inside functions, which an import of every module would not see."""
    table = project_table(folder)
    optional = table.get("optional-dependencies", {}).values()
    requirements = [*table["dependencies"], *(text for extra in optional for text in extra)]
    declared = {canonical(re.match(r"[\w.-]+", text)[0]) for text in requirements}  # type: ignore[index]
    own = {package_dir(folder).name}
    missing = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files(folder)
        for name, line in imports(ast.parse(path.read_text(encoding="utf-8")), lazy=True)
        if name not in own and name not in sys.stdlib_module_names and not distributions_of(name) & declared
    ]
    assert not missing, missing


@pytest.mark.parametrize("folder", MEMBERS)
def test_member_has_the_same_shape_as_every_other(folder: str) -> None:
    base, table = ROOT / folder, project_table(folder)
    assert len((base / "README.md").read_text(encoding="utf-8").splitlines()) >= 8, "a README says what it is"
    assert table["version"] == "0.1.0"
    assert table["license"] == "Apache-2.0"
    assert "modelbay>=0.1,<0.2" in table["dependencies"]
    assert (package_dir(folder) / "__init__.py").is_file()
    if folder in PLUGINS:
        assert list((base / "tests").glob("test_*.py")), f"{folder}/tests holds no tests"
        assert set(table["entry-points"]) == {"modelbay"}
        module = f"{package_dir(folder).name}.plugin"
        assert module in table["entry-points"]["modelbay"].values()


@pytest.mark.parametrize("folder", PLUGINS)
def test_plugin_module_imports_nothing_heavy(folder: str) -> None:
    """``--help`` and ``list-archs`` import each plugin's light ``plugin.py`` and no more."""
    tree = ast.parse((package_dir(folder) / "plugin.py").read_text(encoding="utf-8"))
    names = {name for name, _ in imports(tree, lazy=False)} - set(sys.stdlib_module_names)
    assert names <= {"modelbay", package_dir(folder).name}


def test_every_hook_has_a_first_party_user() -> None:
    """A hook that nobody uses here is a guess."""
    used: set[str] = set()
    for point in entry_points(group="modelbay"):
        registration = read_plugin(importlib.import_module(point.value), point.name)
        assert registration.error is None, registration.error
        used |= {table for table, records in registration.records.items() if records}
    assert used == set(TABLES)


def test_requirements_list_every_member() -> None:
    """Members installed alone by name may fetch a stranger's package, so the list names every folder."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    editable = {line.removeprefix("-e ").removeprefix("./") for line in lines if line.startswith("-e ")}
    assert editable == {".", *MEMBERS}


def test_a_file_is_one_idea() -> None:
    files = [path for folder in FOLDERS for path in source_files(folder)]
    long = {str(path.relative_to(ROOT)) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400}
    assert long == set(LONG_FILES), "split the file, or give the reason in LONG_FILES"
