"""A stranger's distribution, end to end: built, installed beside the built core and runtime, listed, explained, run.

`third_party/acme-tinylm` uses the public hooks and the model contract alone. Its family is what Transformers calls
Granite with two of the four multipliers, under tensor names, config keys and types of its own, so Transformers is the
reference for its numbers.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay_testing.isolation import FreshVenv, fresh_venv
from modelbay_testing.tiny import tiny_checkpoint

ACME = "tests/third_party/acme-tinylm"
PROMPTS = ("The quick brown fox", "A model is loaded, its layers are placed, and text comes out", "0 1 2")
TOKENS = 16
HEAD_SIZE = 16


@pytest.fixture(scope="module")
def venv(wheel: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> FreshVenv:
    """Core, runtime, the first-party Llama and the stranger, each from its wheel."""
    wheels = [wheel(project) for project in (".", "backends/runtime", "plugins/llama", ACME)]
    return fresh_venv(tmp_path_factory.mktemp("acme") / "venv", wheels)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference's checkpoint: tiny, random, with multipliers that change every logit."""
    multipliers = {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 1.0}
    folder = tmp_path_factory.mktemp("granite")
    return tiny_checkpoint(folder, "granite", attention_multiplier=HEAD_SIZE**-0.5, **multipliers)


@pytest.fixture(scope="module")
def acme(granite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as Acme would publish them."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("acme-checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((granite / name).read_bytes())
    theirs = json.loads((granite / "config.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["AcmeForCausalLM"],
        "model_type": "acme_tinylm",
        "dtype": "float32",
        "depth": theirs["num_hidden_layers"],
        "kv_heads": theirs["num_key_value_heads"],
        "embedding_scale": theirs["embedding_multiplier"],
        "logit_divisor": theirs["logits_scaling"],
        **{name: theirs[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
        **{name: theirs[name] for name in ("max_position_embeddings", "rms_norm_eps", "eos_token_id", "bos_token_id")},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(granite / "model.safetensors")
    renamed = {f"tower.{name[6:]}" if name.startswith("model.") else name: tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=5)


def generate(
    venv: FreshVenv, checkpoint: Path, *options: str, check: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    fixed = ("--dtype", "float32", "--device", "cpu", "--temperature", "0", "--max-tokens", str(TOKENS))
    command = ("modelbay", "generate", checkpoint, *fixed, "--ignore-eos", "--json", *prompts, *options)
    return venv.run(*command, check=check, env=env)


@pytest.fixture(scope="module")
def generated(venv: FreshVenv, acme: Path) -> subprocess.CompletedProcess[str]:
    """What the installed plugin makes of Acme's checkpoint, log-probabilities included."""
    return generate(venv, acme, "--logprobs", "0")


def token_ids(result: subprocess.CompletedProcess[str]) -> list[list[int]]:
    return [request["outputs"][0]["token_ids"] for request in json.loads(result.stdout)]


def reference(checkpoint: Path) -> Iterator[tuple[list[int], Any]]:
    """For each prompt: Transformers' greedy tokens, and its logits at every step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        yield output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits)


def explained(result: subprocess.CompletedProcess[str], question: str) -> dict[str, Any]:
    return next(decision for decision in json.loads(result.stdout)["trace"] if decision["question"] == question)


def test_everything_comes_from_the_fresh_environment(venv: FreshVenv) -> None:
    code = "import importlib, sys; print(*(importlib.import_module(name).__file__ for name in sys.argv[1:]))"
    files = venv.run("python", "-c", code, "modelbay", "modelbay_runtime", "acme_tinylm").stdout.split()
    assert len(files) == 3
    assert all(Path(file).is_relative_to(venv.root) for file in files)
    assert "No broken requirements" in venv.pip("check").stdout


def test_a2_it_is_listed_with_its_owner(venv: FreshVenv) -> None:
    listed = {(a["name"], a["owner"]): a for a in json.loads(venv.run("framework", "list-archs", "--json").stdout)}
    acme = listed["AcmeForCausalLM", "acme-tinylm"]
    assert acme["version"] == "1.4.0"
    assert acme["model_types"] == ["acme_tinylm"]
    assert acme["examples"] == ["acme/TinyLM-1B"]
    assert ("LlamaForCausalLM", "acme-tinylm") in listed
    assert ("LlamaForCausalLM", "modelbay-llama") in listed
    plugins = json.loads(venv.run("modelbay", "list-plugins", "--json").stdout)
    assert "acme-tinylm" in json.dumps(plugins)


def test_it_is_explained(venv: FreshVenv, acme: Path) -> None:
    result = venv.run("modelbay", "explain", acme, "--json", "--dtype", "float32")
    resolution = json.loads(result.stdout)["resolution"]
    assert resolution["architecture"] == "AcmeForCausalLM"
    assert resolution["owner"] == "acme-tinylm 1.4.0"
    assert resolution["backend"] == "native"
    assert explained(result, "num_kv_heads")["answer"] == 2
    assert "kv_heads" in explained(result, "num_kv_heads")["source"]
    assert explained(result, "model class")["source"] == "acme-tinylm 1.4.0"
    assert json.loads(result.stdout)["undecided"] == []


def test_it_runs_with_the_numbers_of_the_reference(generated: subprocess.CompletedProcess[str], granite: Path) -> None:
    import torch

    expected = list(reference(granite))
    assert token_ids(generated) == [tokens for tokens, _ in expected]
    for request, (tokens, logits) in zip(json.loads(generated.stdout), expected, strict=True):
        logprobs = torch.log_softmax(logits, -1)[torch.arange(TOKENS), torch.tensor(tokens)]
        assert request["outputs"][0]["cumulative_logprob"] == pytest.approx(logprobs.sum().item(), abs=1e-3)


def test_it_runs_the_same_in_process(
    generated: subprocess.CompletedProcess[str], acme: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``LLM(plugins=[module])`` adds one in-process."""
    monkeypatch.syspath_prepend(root / ACME / "src")
    from acme_tinylm import plugin  # type: ignore[import-not-found]

    from modelbay import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(acme), dtype="float32", device="cpu", plugins=[plugin]) as llm:
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        assert type(llm.apply_model(lambda module: module)[0]).__module__ == "acme_tinylm.model"
    assert [output.outputs[0].token_ids for output in outputs] == token_ids(generated)


def test_two_owners_of_one_name_are_an_error_that_names_both(venv: FreshVenv, llama: Path) -> None:
    result = generate(venv, llama, check=False)
    assert result.returncode == 1
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "LlamaForCausalLM" in line
    assert "acme-tinylm 1.4.0" in line
    assert "modelbay-llama 0.1.0" in line
    assert "--prefer LlamaForCausalLM=" in line
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("owner", ["acme-tinylm", "modelbay-llama"])
def test_prefer_lets_either_serve_the_name(venv: FreshVenv, llama: Path, owner: str) -> None:
    choice = f"LlamaForCausalLM={owner}"
    expected = [tokens for tokens, _ in reference(llama)]
    assert token_ids(generate(venv, llama, "--prefer", choice)) == expected
    result = venv.run("modelbay", "explain", llama, "--json", env={"MODELBAY_PREFER": choice})
    assert json.loads(result.stdout)["resolution"]["owner"].startswith(f"{owner} ")
    model_class = {"acme-tinylm": "AcmeLlama", "modelbay-llama": "LlamaForCausalLM"}[owner]
    assert explained(result, "model class")["answer"] == model_class


def test_without_the_plugin_the_error_names_the_type(venv: FreshVenv, acme: Path) -> None:
    result = venv.run("modelbay", "explain", acme, "--plugins", "runtime,llama", check=False)
    assert result.returncode == 1
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "unknown model_type 'acme_tinylm'" in line
    assert "modelbay-llama 0.1.0" in line
