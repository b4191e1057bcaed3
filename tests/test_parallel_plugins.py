"""Plugins and a repository's own code in every process of a mesh (CASES 1, DESIGN §4, BEHAVIOUR D3)."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay.errors import UsageError
from modelbay_testing.processes import run_to_end
from modelbay_testing.tiny import tiny_checkpoint

_OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "distributed_timeout_seconds": 60,
}  # fmt: skip
_PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
_GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

_PLUGIN = '''
from modelbay import hookimpl
from modelbay.specs import ArchSpec
from modelbay_llama.model import LlamaForCausalLM

class Parrot(LlamaForCausalLM):
    """A family that only this module knows."""

@hookimpl
def register_architectures():
    spec = dict(model_types=("llama",), parallel=("tp", "pp", "dp"))
    return [ArchSpec(name="ParrotForCausalLM", target="parrot_plugin:Parrot", **spec)]
'''


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate(_PROMPT, _GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture
def parrot(tmp_path: Path) -> Path:
    """A checkpoint that names an architecture which nobody has installed."""
    path = tiny_checkpoint(tmp_path / "parrot", "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["ParrotForCausalLM"]}))
    return path


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / "parrot_plugin.py").write_text(_PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("parrot_plugin")
    sys.modules.pop("parrot_plugin", None)


def test_case_1_a_module_given_in_the_launching_script_is_known_in_every_rank(
    parrot: Path, plugin: types.ModuleType
) -> None:
    with LLM(str(parrot), plugins=[plugin], **_OPTIONS) as alone:
        expected = tokens(alone)
    with LLM(str(parrot), plugins=[plugin], tensor_parallel_size=2, **_OPTIONS) as llm:
        assert "ParrotForCausalLM" in llm.resolution.plugins.names("architectures")
        assert llm.apply_model(lambda module: type(module).__name__) == ["Parrot", "Parrot"]
        assert tokens(llm) == expected


def test_case_1_a_module_that_cannot_reach_another_process_is_an_error_that_says_so(parrot: Path) -> None:
    module = types.ModuleType("made_on_the_fly")
    source = types.ModuleType("parrot_source")
    exec(_PLUGIN.replace("parrot_plugin", "parrot_source"), source.__dict__)
    sys.modules["parrot_source"] = source
    try:
        module.register_architectures = source.register_architectures  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match=r"'made_on_the_fly' exists in this process only"):
            LLM(str(parrot), plugins=[module], tensor_parallel_size=2, **_OPTIONS)
    finally:
        del sys.modules["parrot_source"]


def test_ranks_with_other_plugins_say_what_differs(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "llama")
    script = tmp_path / "run.py"
    script.write_text(
        "import os\n"
        "if os.environ['RANK'] == '1':\n    os.environ['MODELBAY_PLUGINS'] = 'runtime,llama'\n"
        f"from modelbay import LLM\nLLM({str(path)!r}, **{_OPTIONS!r}, tensor_parallel_size=2)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = run_to_end(command)
    assert done.returncode != 0
    assert "rank 1 is not the program that rank 0 is" in done.stderr
    assert "qwen2 absent (rank 0: modelbay-qwen2 0.1.0)" in done.stderr
