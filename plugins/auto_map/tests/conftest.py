"""The four example repositories as checkpoints: their code, a random model of their own classes, a tokenizer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM
from modelbay_testing.tiny import tiny_tokenizer

EXAMPLES = Path(__file__).parent / "examples"
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

#: What stands in config.json, besides special tokens.
CONFIGS: dict[str, dict[str, Any]] = {
    "lumen": {
        "model_type": "lumen",
        "architectures": ["LumenForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_lumen.LumenConfig",
            "AutoModel": "modeling_lumen.LumenModel",
            "AutoModelForCausalLM": "modeling_lumen.LumenForCausalLM",
        },
    },
    "quill": {
        "model_type": "quill",
        "architectures": ["QuillModel"],
        "auto_map": {"AutoConfig": "configuration_quill.QuillConfig", "AutoModel": "modeling_quill.QuillModel"},
    },
    "hive": {
        "model_type": "hive",
        "architectures": ["HiveForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_hive.HiveConfig", "AutoModel": "modeling_hive.HiveModel"},
        "logits_scaling": 4.0,
    },
    "grove": {
        "model_type": "grove",
        "architectures": ["GroveForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_grove.GroveConfig",
            "AutoModel": "modeling_grove.GroveModel",
            "AutoModelForCausalLM": "modeling_grove.GroveForCausalLM",
        },
        # As Transformers 4 wrote it.
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "num_key_value_heads": 2,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def code_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformers and Modelbay both keep copies of trusted code: here, not in the user's caches."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.setenv("MODELBAY_CACHE", str(tmp_path_factory.mktemp("modelbay")))
        yield


class CustomReference:
    """The repository's own model, run by Transformers alone: eager attention, float32, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        has_head = "AutoModelForCausalLM" in json.loads((folder / "config.json").read_text())["auto_map"]
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        auto = AutoModelForCausalLM if has_head else AutoModel
        # Not from_pretrained: it builds on meta, where the buffers that these classes compute are lost.
        self.model = auto.from_config(
            self.config, trust_remote_code=True, attn_implementation="eager", dtype=torch.float32
        ).eval()
        tensors = load_file(folder / "model.safetensors")
        if not has_head:
            tensors = {key.removeprefix("model."): value for key, value in tensors.items() if key != "lm_head.weight"}
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        assert not unexpected
        assert missing == (["lm_head.weight"] if has_head and self.config.tie_word_embeddings else [])
        assert type(self.model).__module__.startswith("transformers_modules.")
        self.head = None
        if (folder / "head.pt").exists():
            self.head = torch.load(folder / "head.pt", weights_only=True)

    @torch.inference_mode()
    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """[T, H], of the base model."""
        base = self.model.base_model
        return base(input_ids=torch.tensor([token_ids])).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V]; for a repository without a class that has a head, of a plain one."""
        if self.head is not None:
            return self.hidden(token_ids) @ self.head.T / self.config.logits_scaling
        return self.model(input_ids=torch.tensor([token_ids])).logits[0]

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(token_ids) :]


def write_code(name: str, folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """The example's Python files and its config.json, ``config`` over what it has."""
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    values = {**CONFIGS[name], **_SPECIAL, **(config or {})}
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    return folder


def write_checkpoint(name: str, folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """`write_code`, with random weights of the repository's own classes and a tokenizer."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    write_code(name, folder, config)
    values = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto = AutoModelForCausalLM if "AutoModelForCausalLM" in CONFIGS[name]["auto_map"] else AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = auto.from_config(values, trust_remote_code=True, dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and "norm" in parameter_name and "bias" not in parameter_name
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.1 if is_norm else 0.25)
        tensors = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
        if not getattr(values, "tie_word_embeddings", False) and auto is AutoModelForCausalLM:
            tensors["lm_head.weight"] = model.lm_head.weight.detach()
        if name == "hive":  # no class of the repository has the head
            head = torch.randn(values.vocab_size, values.hidden_size) * 0.25
            tensors = {f"model.{key}": value for key, value in tensors.items()} | {"lm_head.weight": head}
            torch.save(head, folder / "head.pt")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tiny_tokenizer(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint("lumen")``: that repository's directory, made at the first call."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_checkpoint(name, tmp_path_factory.mktemp(name) / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], CustomReference]:
    made: dict[str, CustomReference] = {}

    def make(name: str) -> CustomReference:
        return made.setdefault(name, CustomReference(checkpoint(name)))

    return make


@pytest.fixture
def code(tmp_path: Path) -> Callable[..., Path]:
    """``code("lumen", {"old": "new"}, config={…})``: a copy without weights, its Python changed, to be refused.

    Each change must be found in exactly one file, at least once.
    """

    def make(name: str, changes: Mapping[str, str] | None = None, config: Mapping[str, Any] | None = None) -> Path:
        folder = write_code(name, tmp_path / f"broken-{name}", config)
        for old, new in (changes or {}).items():
            [path] = [path for path in folder.glob("*.py") if old in path.read_text()]
            path.write_text(path.read_text().replace(old, new))
        return tiny_tokenizer(folder)

    return make


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`write_checkpoint` into a folder of this test."""
    return lambda name, folder="model", config=None: write_checkpoint(name, tmp_path / folder, config)


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    """An `LLM` that trusts and that is closed with the test."""
    with ExitStack() as stack:
        yield lambda model, **options: stack.enter_context(
            LLM(str(model), **{"trust_remote_code": True, "dtype": "float32", "device": "cpu", **options})
        )


@pytest.fixture(scope="session")
def prompts() -> list[dict[str, list[int]]]:
    """Seven prompts of 1 to 120 tokens; the last begins with the whole of the fourth."""
    draw = random.Random(5)
    made = [[1, *(draw.randrange(3, 250) for _ in range(length - 1))] for length in (1, 5, 16, 47, 100, 120)]
    made.append([*made[3], *(draw.randrange(3, 250) for _ in range(9))])
    return [{"prompt_token_ids": ids} for ids in made]
