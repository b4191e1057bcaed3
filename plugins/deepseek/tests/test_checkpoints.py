"""Checkpoints as the official repositories have them: FP8 blocks, prediction layers, configs with ``auto_map``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelbay import LLM, resolve
from modelbay.errors import ConfigError, WeightsError
from modelbay.weights.accounting import LoadReport
from modelbay_testing.tiny import tiny_checkpoint

#: Neither divides the tiny weights, so that blocks at the ends are smaller.
ROWS, COLUMNS = 48, 40


def checkpoint(path: Path, **values: object) -> Path:
    sizes = {
        "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    return tiny_checkpoint(path, "deepseek_v3", dtype="bfloat16", **{**sizes, **values})


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: object) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**values, **config}), encoding="utf-8")
    return path


def quantised(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    """Every projection in e4m3, each block by its own largest value."""
    for name in filter(quantised, list(tensors)):
        weight = tensors[name].float()
        rows, columns = -(-weight.shape[0] // ROWS), -(-weight.shape[1] // COLUMNS)
        scales, values = torch.empty(rows, columns), torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                block = (slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS))
                scales[i, j] = weight[block].abs().max() / 448 * (1 + 0.01 * i + 0.02 * j)
                values[block] = weight[block] / scales[i, j]
        tensors[name] = values.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales


def plain(tensors: dict[str, torch.Tensor]) -> None:
    """The bfloat16 file made from a quantised one."""
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scales, weight = tensors.pop(name), tensors[name.removesuffix("_scale_inv")].float()
        full = scales.repeat_interleave(ROWS, 0).repeat_interleave(COLUMNS, 1)
        tensors[name.removesuffix("_scale_inv")] = (weight * full[: weight.shape[0], : weight.shape[1]]).bfloat16()


_BLOCKS = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [ROWS, COLUMNS]}
FP8 = {"quantization_config": {"quant_method": "fp8", **_BLOCKS}}


def parameters(path: Path, **kwargs: Any) -> tuple[dict[str, torch.Tensor], LoadReport]:
    with LLM(str(path), kernels="torch", kv_cache_memory_bytes=1 << 22, **kwargs) as llm:
        [state] = llm.apply_model(lambda model: {name: p.detach().clone() for name, p in model.named_parameters()})
        return state, llm.load_report


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_fp8_equals_the_bfloat16_file_made_from_it(model_impl: str, tmp_path: Path) -> None:
    path = rewrite(checkpoint(tmp_path / "model"), quantise, **FP8)
    found, report = parameters(path, model_impl=model_impl)
    assert report.unaccounted() == []
    scales = [use for name, use in report.tensors.items() if name.endswith("_scale_inv")]
    assert scales
    assert {use.status for use in scales} == {"loaded"}
    assert report.casts["float8_e4m3fn -> bfloat16"] == len(scales)
    [said] = [d.answer for d in resolve(str(path)).trace.decisions if d.question == "quantization method"]
    assert said == "fp8 (blocks with a scale each)"
    expected, _ = parameters(rewrite(path, plain, quantization_config=None), model_impl=model_impl)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert {value.dtype for name, value in found.items() if "proj" in name} == {torch.bfloat16}


def test_fp8_in_float32_keeps_what_bfloat16_would_round(tmp_path: Path) -> None:
    path = rewrite(checkpoint(tmp_path / "model"), quantise, **FP8)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    full = tensors[f"{name}_scale_inv"].repeat_interleave(ROWS, 0).repeat_interleave(COLUMNS, 1)
    expected = tensors[name].float() * full[: tensors[name].shape[0], : tensors[name].shape[1]]
    found, _ = parameters(path, dtype="float32")
    assert torch.equal(found[name], expected)


def test_case_33_prediction_layers_are_skipped_by_name_scales_included(tmp_path: Path) -> None:
    """Case 33."""
    path = checkpoint(tmp_path / "model")
    expected, _ = parameters(path)

    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("layers.1.", "layers.2.")] = torch.full_like(tensors[name], 3.0)
        for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.2.{name}.weight"] = torch.ones(64, 128 if name == "eh_proj" else 1)

    rewrite(path, add_layer, num_nextn_predict_layers=1)
    found, _ = parameters(path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    rewrite(path, quantise, **FP8)
    _, report = parameters(path)
    beyond = {name for name in report.tensors if name.startswith("model.layers.2.")}
    assert any(name.endswith("scale_inv") for name in beyond)
    assert report.ignored_by_rule() == {"layer beyond num_hidden_layers": len(beyond)}
    assert report.unaccounted() == []


def test_official_auto_map_is_never_run_trusted_or_not(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    marker = tmp_path / "ran"
    for name in ("configuration_deepseek", "modeling_deepseek"):
        (path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit\n", encoding="utf-8")
    classes = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    rewrite(path, lambda tensors: None, auto_map=classes)
    for trusted in (False, True):
        resolution = resolve(str(path), trust_remote_code=trusted)
        assert (resolution.backend, str(resolution.owner)) == ("native", "modelbay-deepseek 0.1.0")
    assert not marker.exists()


def test_missing_scales_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        quantise(tensors)
        del tensors[name]

    with pytest.raises(WeightsError, match=rf"experts\.3\.up_proj\.weight is float8_e4m3fn, and .*{name}, is absent"):
        LLM(str(rewrite(checkpoint(tmp_path / "model"), change, **FP8)))


def test_scales_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.kv_b_proj.weight_scale_inv"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        quantise(tensors)
        tensors[name] = tensors[name][:-1].clone()

    with pytest.raises(
        WeightsError, match=rf"{name} is float32 \[2, 1\]; .*\[112, 32\] in blocks of 48 × 40 .*\[3, 1\]"
    ):
        LLM(str(rewrite(checkpoint(tmp_path / "model"), change, **FP8)))


def test_fp8_without_blocks_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """C11: the method is served, this kind of it is not."""
    path = rewrite(checkpoint(tmp_path / "model"), lambda tensors: None, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="weight_block_size None"):
        resolve(str(path))


def test_fp8_tensors_without_a_quantization_config_are_not_loaded_unscaled(tmp_path: Path) -> None:
    path = rewrite(checkpoint(tmp_path / "model"), quantise)
    with pytest.raises(WeightsError, match="weight_scale_inv"):
        LLM(str(path))


@pytest.mark.parametrize("gone", [["gate_proj"], ["gate_proj", "up_proj", "down_proj"]])
@pytest.mark.parametrize("expert", [3, 7])
def test_expert_missing_in_one_layer(gone: list[str], expert: int, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in gone:
            del tensors[f"model.layers.1.mlp.experts.{expert}.{part}.weight"]

    path = rewrite(checkpoint(tmp_path / "model"), change)
    reasons = {
        (3, 1): r"experts\.gate_proj' is stacked from numbers 0, 1, 2, 4,",
        (7, 1): r"experts\.gate_proj, stacked from 7 tensors, is \[7, 32, 64\], the model wants \[8, 32, 64\]",
        (3, 3): r"experts\.gate_proj' is stacked from numbers 0, 1, 2, 4,",
        (7, 3): r"experts\.down_proj, stacked from 7 tensors, is \[7, 64, 32\], the model wants \[8, 64, 32\]",
    }
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\." + reasons[expert, len(gone)]):
        LLM(str(path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_group": 3}, "8 experts do not divide into 3 groups.*n_group 3"),
        ({"n_group": 2, "topk_group": 3}, "3 of 2 groups"),
        ({"num_experts_per_tok": 5}, "goes to 5 experts and may choose from 4"),
        ({"n_group": 1, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        ({"n_group": 8, "topk_group": 4}, "ranked by 2 experts and has 1"),
        ({"topk_method": "lottery"}, "topk_method is 'lottery'; known are greedy"),
        ({"scoring_func": "tanh"}, "scored by 'tanh'; softmax and sigmoid"),
    ],
)
def test_routing_that_does_not_fit_is_refused_at_build(values: dict, message: str, tmp_path: Path) -> None:
    path = rewrite(checkpoint(tmp_path / "model"), lambda tensors: None, **values)
    with pytest.raises(ConfigError, match=message):
        LLM(str(path))


def test_experts_per_token_has_no_default_in_v2(tmp_path: Path) -> None:
    path = rewrite(checkpoint(tmp_path / "model"), lambda tensors: None, num_experts_per_tok=None)
    overrides = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    with pytest.raises(ConfigError, match="no num_experts_per_tok"):
        LLM(str(path), hf_overrides=overrides)
