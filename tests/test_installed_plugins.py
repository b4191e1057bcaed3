"""The plugin rules with real distributions: the core's wheel and a stranger's plugins in a fresh venv."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay_testing.distributions import write_wheel
from modelbay_testing.isolation import FreshVenv, fresh_venv

HEADER = """
import os
import pathlib
from modelbay import hookimpl
from modelbay.specs import ArchSpec, CommandSpec, LoadFormatSpec

if "SENTINEL" in os.environ:
    with open(os.environ["SENTINEL"], "a") as sentinel:
        sentinel.write(__name__ + "\\n")
"""

GOOD = """
@hookimpl
def register_architectures():
    return [ArchSpec(name=name, target="acme_good_model:Model") for name in ("GoodForCausalLM", "SharedForCausalLM")]

@hookimpl
def register_commands():
    return [CommandSpec(name="good", target="acme_good_model:command", summary="Say so.")]
"""

MODEL = """
import click

@click.command("good")
def command():
    click.echo("good ran")
"""

RIVAL = """
@hookimpl
def register_architectures():
    return [ArchSpec(name="SharedForCausalLM", target="acme_rival:Model")]
"""

#: Right in its first table, wrong in the second: nothing of it may count.
HALFWAY = """
@hookimpl
def register_architectures():
    return [ArchSpec(name="HalfwayForCausalLM", target="acme_halfway:Model")]

@hookimpl
def register_load_formats():
    return [LoadFormatSpec(name="half", target="no colon")]
"""


@pytest.fixture(scope="module")
def venv(wheel: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> FreshVenv:
    """The core and four plugins: two that work and share a name, one that cannot be imported, one half right."""
    folder = tmp_path_factory.mktemp("installed")
    plugins = {
        "acme-good": {"acme_good.py": HEADER + GOOD, "acme_good_model.py": MODEL},
        "acme-rival": {"acme_rival.py": HEADER + RIVAL},
        "acme-broken": {"acme_broken.py": HEADER + "import flash_attention_of_another_age"},
        "acme-halfway": {"acme_halfway.py": HEADER + HALFWAY},
    }
    wheels = [write_wheel(folder / "wheels", name, modules) for name, modules in plugins.items()]
    return fresh_venv(folder / "venv", [wheel("."), *wheels])


def modelbay(venv: FreshVenv, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return venv.run("modelbay", *argv, check=False, env={"MODELBAY_CONFIG": "", **env})


def archs(venv: FreshVenv, *argv: str, **env: str) -> list[tuple[str, str]]:
    result = modelbay(venv, "list-archs", "--json", *argv, **env)
    assert result.returncode == 0, result.stderr
    return [(arch["name"], arch["owner"]) for arch in json.loads(result.stdout)]


def python(venv: FreshVenv, code: str, **env: str) -> Any:
    return venv.run("python", "-c", code, env={"MODELBAY_CONFIG": "", **env}).stdout.strip()


GOOD_ARCHS = [("GoodForCausalLM", "acme-good"), ("SharedForCausalLM", "acme-good")]


def test_plugins_that_fail_are_skipped_with_a_warning_and_leave_nothing_behind(venv: FreshVenv) -> None:
    """Case 2."""
    result = modelbay(venv, "list-archs", "--json")
    assert result.returncode == 0
    assert [(a["name"], a["owner"], a["version"]) for a in json.loads(result.stdout)] == [
        ("GoodForCausalLM", "acme-good", "1.0"),
        ("SharedForCausalLM", "acme-good", "1.0"),
        ("SharedForCausalLM", "acme-rival", "1.0"),
    ]
    broken, halfway = sorted(result.stderr.splitlines())
    assert broken == (
        "warning: plugin acme-broken 1.0 (entry point 'broken') skipped: "
        "ModuleNotFoundError: No module named 'flash_attention_of_another_age'"
    )
    assert halfway.startswith("warning: plugin acme-halfway 1.0 (entry point 'halfway') skipped: ")
    assert "hook 'register_load_formats'" in halfway
    assert "'no colon'" in halfway


def test_list_plugins_shows_the_failures(venv: FreshVenv) -> None:
    records = {record["name"]: record for record in json.loads(modelbay(venv, "list-plugins", "--json").stdout)}
    assert {name: record["status"] for name, record in records.items()} == {
        "core": "loaded",
        "good": "loaded",
        "rival": "loaded",
        "broken": "failed",
        "halfway": "failed",
    }
    assert records["good"]["hooks"] == ["register_architectures", "register_commands"]


def test_strict_fails_with_one_line(venv: FreshVenv) -> None:
    for argv in (
        ["--strict-plugins", "list-archs"],
        ["list-archs", "--strict-plugins"],
        ["--strict-plugins", "--help"],
    ):
        result = modelbay(venv, *argv)
        assert result.returncode == 1
        assert result.stdout == ""
        assert result.stderr.startswith("error: plugin 'broken' of acme-broken 1.0 failed: ModuleNotFoundError")
        assert result.stderr.count("\n") == 1
    assert modelbay(venv, "--strict-plugins", "list-archs", "--plugins", "good").returncode == 0


def test_help_works_beside_a_broken_plugin_and_commands_of_plugins_run(venv: FreshVenv) -> None:
    result = modelbay(venv, "--help")
    assert result.returncode == 0
    assert "Say so." in result.stdout
    assert modelbay(venv, "good").stdout == "good ran\n"
    assert venv.run("framework", "good").stdout == "good ran\n"
    assert venv.run("python", "-m", "modelbay", "good").stdout == "good ran\n"


@pytest.mark.parametrize(
    ("argv", "env", "expected"),
    [
        ([], {"MODELBAY_PLUGINS": "good"}, GOOD_ARCHS),
        (["--plugins", "good"], {}, GOOD_ARCHS),
        (["--plugins", "acme-good"], {"MODELBAY_PLUGINS": "rival"}, GOOD_ARCHS),
        ([], {"MODELBAY_PLUGINS": "rival"}, [("SharedForCausalLM", "acme-rival")]),
        ([], {"MODELBAY_PLUGINS": ""}, []),
        (["--plugins", ""], {"MODELBAY_PLUGINS": "good"}, []),
    ],
)
def test_selection(venv: FreshVenv, argv: list[str], env: dict[str, str], expected: list[tuple[str, str]]) -> None:
    assert archs(venv, *argv, **env) == expected


def test_an_unknown_name_warns(venv: FreshVenv) -> None:
    result = modelbay(venv, "list-archs", "--json", MODELBAY_PLUGINS="good,godo")
    assert result.returncode == 0
    assert result.stderr == "warning: no plugin 'godo' is installed; nearest: good (MODELBAY_PLUGINS)\n"


ASK = """
from modelbay.plugins import load_plugins
from modelbay.errors import ModelbayError
try:
    print(load_plugins(prefer={prefer}).require("architectures", "{name}", "architecture").owner)
except ModelbayError as error:
    print(type(error).__name__, error)
"""


def test_two_owners_conflict_at_use_and_a_preference_chooses(venv: FreshVenv, tmp_path: Path) -> None:
    shared = ASK.format(name="SharedForCausalLM", prefer="None")
    message = python(venv, shared)
    assert message.startswith("PluginConflictError")
    for part in ("acme-good 1.0", "acme-rival 1.0", "--prefer SharedForCausalLM=acme-rival"):
        assert part in message
    assert python(venv, shared, MODELBAY_PREFER="SharedForCausalLM=acme-rival") == "acme-rival 1.0"
    config = tmp_path / "config.toml"
    config.write_text('[prefer]\nSharedForCausalLM = "acme-good"\n')
    assert python(venv, shared, MODELBAY_CONFIG=str(config)) == "acme-good 1.0"
    argument = ASK.format(name="SharedForCausalLM", prefer={"SharedForCausalLM": "acme-rival"})
    assert python(venv, argument, MODELBAY_CONFIG=str(config)) == "acme-rival 1.0"


def test_what_only_a_failed_plugin_offers_names_its_failure(venv: FreshVenv) -> None:
    message = python(venv, ASK.format(name="HalfwayForCausalLM", prefer="None"))
    assert "acme-halfway 1.0 (entry point 'halfway') offers it but failed to load" in message
    assert "'no colon'" in message
    other = python(venv, ASK.format(name="ZebraForCausalLM", prefer="None"))
    assert "ModuleNotFoundError: No module named 'flash_attention_of_another_age'" in other


def test_version_loads_no_plugin_and_selection_loads_only_the_selected(venv: FreshVenv, tmp_path: Path) -> None:
    sentinel = tmp_path / "imported"
    assert modelbay(venv, "--version", SENTINEL=str(sentinel)).stdout.startswith("modelbay ")
    assert not sentinel.exists()
    modelbay(venv, "list-archs", "--plugins", "rival", SENTINEL=str(sentinel))
    assert sentinel.read_text().split() == ["acme_rival"]
    modelbay(venv, "--help", SENTINEL=str(sentinel))
    assert {"acme_good", "acme_broken", "acme_halfway"} <= set(sentinel.read_text().split())


def test_another_process_loads_the_same_set(venv: FreshVenv) -> None:
    """Case 1."""
    code = """
import multiprocessing
from modelbay.plugins import load_plugins

def manifest(_):
    return load_plugins().manifest()

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (child,) = pool.map(manifest, [None])
    assert child == manifest(None)
    print(child)
"""
    script = venv.root / "spawned.py"
    script.write_text(code)
    assert "'good': 'acme-good 1.0', 'rival': 'acme-rival 1.0'" in venv.run("python", script).stdout
