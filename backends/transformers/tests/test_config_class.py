"""A config's class is the one that Transformers' AutoConfig chooses, and what it says of its layers is what they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from modelbay import LLM, PoolingParams, resolve
from modelbay.errors import BackendError
from modelbay_runtime.build import build_model
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.tiny import tiny_checkpoint
from modelbay_transformers import classes

PROMPTS = [[5, 6, 7, 8], list(range(9, 49))]
FULL, SLIDING = "full_attention", "sliding_attention"


def mistral(path: Path, layer_types: Any, **values: Any) -> Path:
    """A checkpoint of Mistral's whose config has had layer types added to it."""
    tiny_checkpoint(path, "mistral", sliding_window=8)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "layer_types": layer_types, **values}))
    return path


def load(path: Path, **arguments: Any) -> LLM:
    return LLM(
        str(path), model_impl="transformers", dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 22,
        **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [[FULL, FULL], [FULL, SLIDING], None], ids=["full", "mixed", "null"])
def test_c9_a_mistral_with_layer_types_is_what_auto_config_makes_of_it(kinds: Any, tmp_path: Path) -> None:
    path = mistral(tmp_path, kinds)
    with load(path) as llm:
        found = engine_logits(llm, PROMPTS, 2)
        said = llm.resolution.trace.find("model class")
    assert worst_difference([rows for _, rows in found], transformers_logits(path, [ids for ids, _ in found])) <= 1e-4
    assert said is not None
    assert "MinistralForCausalLM" in said.source


def test_c9_the_same_for_hidden_states_and_for_a_classifier(tmp_path: Path) -> None:
    """The window of eight would be seen in forty tokens."""
    tokens = torch.tensor([PROMPTS[1]])
    path = mistral(tmp_path / "base", [FULL, FULL], architectures=["MistralModel"])
    with load(path, runner="pooling") as llm, torch.inference_mode():
        [output] = llm.encode({"prompt_token_ids": PROMPTS[1]}, use_tqdm=False)
        expected = AutoModel.from_pretrained(path, dtype=torch.float32).eval()(tokens).last_hidden_state[0]
    assert (output.hidden_states - expected).abs().max() <= 1e-4
    path = mistral(tmp_path / "head", [FULL, FULL])
    torch.manual_seed(0)
    reference = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=3).eval()
    torch.nn.init.normal_(reference.score.weight)
    reference.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForSequenceClassification"]}
    (path / "config.json").write_text(json.dumps(config))
    with load(path) as llm, torch.inference_mode():
        [found] = llm.classify({"prompt_token_ids": PROMPTS[1]}, PoolingParams(use_activation=False), use_tqdm=False)
        assert (torch.tensor(found.probs) - reference(tokens).logits[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["ministral", "llama", "gemma2"])
def test_c9_any_other_config_keeps_its_class(name: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, name, sliding_window=8, head_dim=16)
    assert classes.own_config(resolve(str(path)).config).model_type == name


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ([FULL, SLIDING], "layer 0 as 'full', and MistralModel attends over a window of 8"),
        ([SLIDING, SLIDING], None),
    ],
)
def test_c9_a_window_that_the_layer_types_deny_is_refused(
    kinds: list[str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a class chosen that does not read them."""
    monkeypatch.setattr(classes, "_chosen_by_auto_config", lambda raw, listed: listed)
    path = mistral(tmp_path, kinds)
    resolution = resolve(str(path), model_impl="transformers", dtype="float32", max_model_len=128)
    if found is None:
        build_model(resolution)
        return
    with pytest.raises(BackendError) as error:
        build_model(resolution)
    assert found in error.value.message


def test_c9_a_window_that_the_layers_do_not_have_is_refused(tmp_path: Path) -> None:
    """Llama's code knows no window; in a sequence no longer than it there is none to see."""
    path = tiny_checkpoint(tmp_path, "llama")
    overrides = {"layer_types": [FULL, SLIDING], "sliding_window": 8}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **overrides}))
    resolution = resolve(str(path), model_impl="transformers", dtype="float32", max_model_len=128)
    with pytest.raises(BackendError, match="layer 1 as 'sliding', and LlamaModel attends to everything"):
        build_model(resolution)
    build_model(resolve(str(path), model_impl="transformers", dtype="float32", max_model_len=8))
