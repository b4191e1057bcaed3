"""C5: how much of a head turns is what the model's own code does; a config that says otherwise is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM, resolve
from modelbay.cli.main import run
from modelbay.errors import BackendError
from modelbay_runtime.build import build_model
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.tiny import tiny_checkpoint
from modelbay_testing.tiny_configs import tiny_config

PROMPTS = [[5, 6, 7, 8], list(range(9, 49))]


def edited(path: Path, model_type: str, *, inside: bool = False, **values: Any) -> Path:
    """A checkpoint whose config has had these values added to it, or to its RoPE."""
    tiny_checkpoint(path, model_type)
    config = json.loads((path / "config.json").read_text())
    (config["rope_parameters"] if inside else config).update(values)
    (path / "config.json").write_text(json.dumps(config))
    return path


def built(path: Path, **arguments: Any) -> Any:
    resolution = resolve(str(path), model_impl="transformers", dtype="float32", max_model_len=128, **arguments)
    build_model(resolution)
    return resolution.trace


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "olmo2"])
def test_c5_a_share_that_the_class_does_not_read_is_refused(model_type: str, inside: bool, tmp_path: Path) -> None:
    path = edited(tmp_path, model_type, inside=inside, partial_rotary_factor=0.5)
    with pytest.raises(BackendError) as error:
        built(path)
    assert "Model turns 16 of 16 dimensions of each head" in error.value.message
    assert "by the config's partial_rotary_factor it is 8" in error.value.message


def test_c5_and_runs_as_transformers_does_where_that_is_said(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama", inside=True, partial_rotary_factor=0.5)
    said = {"partial_rotary_factor": 1}  # the hint
    with LLM(
        str(path), model_impl="transformers", dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 22,
        hf_overrides=said,
    ) as llm:  # fmt: skip
        found = engine_logits(llm, PROMPTS, 2)
    assert worst_difference([rows for _, rows in found], transformers_logits(path, [ids for ids, _ in found])) <= 1e-4


def test_c5_explain_does_not_print_what_would_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited(tmp_path, "llama", partial_rotary_factor=0.5)
    assert run(["explain", str(path), "--model-impl", "transformers", "--device", "cpu"]) == 1
    assert "LlamaModel turns 16 of 16 dimensions" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["phi", "gpt_neox", "glm", "nemotron", "stablelm"])
def test_c5_a_share_that_the_class_reads_is_seen(model_type: str, tmp_path: Path) -> None:
    """Whichever half turns, in pairs of neighbours or of halves, with one linear for q, k and v or three."""
    path = tiny_checkpoint(tmp_path, model_type, partial_rotary_factor=0.5, rotary_pct=0.5, head_dim=16)
    trace = built(path)
    assert trace.find("dimensions of a head that turn").answer == "8 of 16"
    assert trace.find("rope", "config").answer["default"]["rotary_dim"] == 8


def test_c5_a_head_that_the_config_has_wrong_is_corrected_in_the_trace(tmp_path: Path) -> None:
    """Heads of two sizes: what is taken for granted of the smaller one is not so, and nobody said it."""
    tiny_config("gemma4_text", architectures=["Gemma4ForCausalLM"]).save_pretrained(tmp_path)
    trace = built(tmp_path)
    turning = trace.find("dimensions of a head that turn").answer
    rope = trace.find("rope", "config")
    assert turning["sliding"] == "16 of 16"
    assert rope.answer["sliding"]["rotary_dim"] == 16
    assert "sliding.rotary_dim corrected: probe" in rope.source


@pytest.mark.parametrize("max_model_len", [8, 64, None])
def test_c5_slow_dimensions_are_seen_however_short_the_texts(max_model_len: int | None, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 32768, "rope_theta": 1e7}
    path = tiny_checkpoint(
        tmp_path, "glm", head_dim=128, rope_parameters={**yarn, "partial_rotary_factor": 0.5},
        max_position_embeddings=131072,
    )  # fmt: skip
    resolution = resolve(
        str(path), model_impl="transformers", dtype="float32", max_model_len=max_model_len, max_num_batched_tokens=8,
        kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    build_model(resolution)
    assert resolution.trace.find("dimensions of a head that turn").answer == "64 of 128"


def test_layers_without_rope_among_others_are_no_contradiction(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "smollm3", no_rope_layers=[1, 0], num_hidden_layers=2)
    assert built(path).find("dimensions of a head that turn").answer == "16 of 16"


def test_x1_nothing_is_left_of_the_run_that_looks(tmp_path: Path) -> None:
    from modelbay_transformers import dispatch
    from modelbay_transformers.meta import build_on_meta
    from modelbay_transformers.turning import turning_dimensions

    dispatch.register()
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    base: Any = build_on_meta(LlamaModel, config, dispatch.ATTENTION, torch.bfloat16)
    before = {name: id(parameter) for name, parameter in base.named_parameters()}
    kinds = {layer.self_attn: "full" for layer in base.layers}
    for longest in (1, 16, 1 << 20):
        assert turning_dimensions(base, kinds, longest) == {"full": 16}
    assert {name: id(parameter) for name, parameter in base.named_parameters()} == before
    assert all(parameter.is_meta for parameter in base.parameters())
    assert not any("forward" in module.__dict__ for module in base.modules())
