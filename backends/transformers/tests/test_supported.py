"""A2: `list-archs --all` shows what only the Transformers backend serves, from the matrix' data."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from modelbay.cli.main import run
from modelbay_transformers.backend import TransformersBackend


def test_a2_list_archs_all_adds_what_only_the_backend_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list-archs", "--json"]) == 0
    native = {arch["name"] for arch in json.loads(capsys.readouterr().out)}
    assert run(["list-archs", "--all", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    beyond = {arch["name"]: arch for arch in listed if arch["owner"] == "modelbay-transformers"}
    assert "LlamaForCausalLM" in native
    assert not native & beyond.keys()
    assert native <= {arch["name"] for arch in listed}
    assert beyond["GemmaForCausalLM"]["tasks"] == ["generate"]
    assert beyond["GemmaForCausalLM"]["model_types"] == ["gemma"]
    assert beyond["BertModel"]["tasks"] == ["embed"]
    assert "MambaForCausalLM" not in beyond


def test_a2_the_list_says_what_the_data_says() -> None:
    specs = TransformersBackend().supported()
    assert sum(len(spec.model_types) for spec in specs if spec.tasks == ("generate",)) >= 130
    assert sum(len(spec.model_types) for spec in specs if spec.tasks == ("embed",)) >= 30


def test_a2_listing_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from modelbay.cli.main import run; run(['list-archs', '--all']); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
