"""Who may import whom: what must stay light imports neither torch nor transformers (CASES 4)."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "safetensors")

RUN = """
import sys
sys.argv[0] = "modelbay"
try:
    if len(sys.argv) == 1:
        import modelbay
        from modelbay import architectures, backends, hookimpl, resolve
    else:
        from modelbay.cli.main import main
        main()
finally:
    print("imported:", *sorted(sys.modules), file=sys.stderr)
"""


def imported(*argv: str) -> set[str]:
    result = subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=True)
    line = next(line for line in result.stderr.splitlines() if line.startswith("imported: "))
    return set(line.split()[1:])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--version"],
        ["--help"],
        ["list-archs"],
        ["list-archs", "--json"],
        ["list-plugins"],
        ["version"],
        ["config"],
        ["explain", "--help"],
    ],
)
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    """With every installed plugin loaded; also rich is left out where nothing is printed on a terminal."""
    modules = imported(*argv)
    assert "modelbay" in modules
    assert modules.isdisjoint({*HEAVY, "rich"}), modules & {*HEAVY, "rich"}


def test_version_imports_no_plugin() -> None:
    plugins = {"modelbay.builtin", "modelbay_llama.plugin", "modelbay_runtime.plugin"}
    assert imported("--version").isdisjoint(plugins)
    assert "modelbay.builtin" in imported("--help")
