"""FP8 that stays FP8: the same logits as dequantised, in half the memory, over ranks too."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelbay import LLM, resolve
from modelbay.errors import WeightsError
from modelbay.trace import Trace
from modelbay.weights.accounting import LoadReport
from modelbay_runtime.build import build_model
from modelbay_runtime.check import check_model
from modelbay_runtime.loading import load_weights
from modelbay_runtime.parallel.holdings import holdings
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_testing.logits import engine_logits, worst_difference
from modelbay_testing.parallel import mesh_logits, run_mesh
from modelbay_testing.tiny import tiny_checkpoint

#: Neither divides the tiny weights or the ranks' slices of them.
ROWS, COLUMNS = 48, 40
KEPT = "fp8"
SEQUENCES = [[5, 9, 200, 31, 7, 88, 120], [3, 4, 5, 6, 250]]
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
    "qwen2": {},
}  # fmt: skip


def quantised(
    path: Path, model_type: str = "deepseek_v3", block: tuple[int, int] = (ROWS, COLUMNS), **values: Any
) -> Path:
    """A checkpoint whose projections are e4m3 in blocks, as the official repositories have them."""
    tiny_checkpoint(path, model_type, dtype="bfloat16", **{**SIZES[model_type], **values})
    tensors = load_file(path / "model.safetensors")
    rows, columns = block
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_proj_with_mqa.weight"))]:
        weight = tensors[name].float()
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = part.abs().max() / 448 * (1 + 0.01 * i + 0.02 * j)
                part /= scales[i, j]
        tensors[name] = weight.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return configure(path, quantization_config=said)


def configure(path: Path, **values: Any) -> Path:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised(tmp_path_factory.mktemp("v3") / "model")


def said(trace: Trace, question: str = "quantised weights") -> str:
    [decision] = [decision for decision in trace.decisions if decision.question == question]
    return f"{decision.answer} [{decision.source}]"


@dataclass
class Ran:
    logits: list[torch.Tensor]
    trace: Trace
    report: LoadReport

    @property
    def held(self) -> set[str]:
        """The parameters in 8 bits."""
        return {name for name, use in self.report.parameters.items() if use.dtype == "float8_e4m3fn"}


def run(path: Path, **options: Any) -> Ran:
    with LLM(str(path), dtype="float32", kv_cache_memory_bytes=1 << 22, **options) as llm:
        found = [logits for _, logits in engine_logits(llm, SEQUENCES, output_tokens=4)]
        return Ran(found, llm.resolution.trace, llm.load_report)


@pytest.mark.parametrize("model_type", SIZES)
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_w4_kept_equals_dequantised(model_type: str, model_impl: str, tmp_path: Path) -> None:
    path = quantised(tmp_path / "model", model_type)
    plain = run(path, model_impl=model_impl)
    kept = run(path, model_impl=model_impl, quantization=KEPT)
    assert worst_difference(kept.logits, plain.logits) <= 1e-4
    assert "dequantised to float32" in said(plain.trace)
    assert "kept in float8_e4m3fn, blocks of 48 × 40" in said(kept.trace)
    assert kept.report.unaccounted() == []
    assert {use.dtype for use in plain.report.parameters.values()} == {"float32"}
    scales = {name for name in kept.report.parameters if name.endswith("_scale_inv")}
    assert {name.removesuffix("_scale_inv") for name in scales} == kept.held
    assert any("o_proj" in name for name in kept.held)


def test_half_the_bytes_are_resident_and_said(tmp_path: Path) -> None:
    """Measured on the parameters in memory, in bfloat16, blocks of the official size; `check` and `plan` say it."""
    path = quantised(
        tmp_path / "model", block=(128, 128), hidden_size=256, intermediate_size=512, moe_intermediate_size=256,
        vocab_size=256, n_routed_experts=16,
    )  # fmt: skip
    taken, reported, counted = {}, {}, {}
    for quantization in (None, KEPT):
        with LLM(str(path), quantization=quantization, kernels="torch", kv_cache_memory_bytes=1 << 22) as llm:
            module = llm.engine.model
            taken[quantization] = sum(p.untyped_storage().nbytes() for p in module.parameters())
            assert llm.engine.executor.rank.built.parameter_bytes() == sum(p.nbytes for p in module.parameters())
        report = check_model(str(path), {"quantization": quantization})
        assert report.missing == []
        assert report.memory is not None
        reported[quantization] = report.memory.weights - report.memory.copies
        found = holdings(resolve(str(path), quantization=quantization), Mesh(tp=2))
        counted[quantization] = (found.parameters, sum(rank.weight_bytes for rank in found.ranks))
    routed = 2 * 16 * 3 * 256 * 256
    assert taken[None] - taken[KEPT] > routed, "not even the experts are in one byte"
    assert taken[KEPT] / taken[None] < 0.56
    assert reported[KEPT] == pytest.approx(taken[KEPT], rel=0.01)
    assert counted[KEPT][0] == counted[None][0], "scales are no parameters"
    assert counted[KEPT][1] / counted[None][1] < 0.6


MESHES = [
    Mesh(tp=2), Mesh(tp=4), Mesh(pp=3), Mesh(tp=2, pp=2), Mesh(tp=2, expert_parallel=True),
    Mesh(dp=2, expert_parallel=True),
]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_d2_w4_over_ranks(mesh: Mesh, v3: Path) -> None:
    """Slices begin within blocks: 16 columns of an expert are cut from blocks of 40."""
    expected = mesh_logits(v3, Mesh(), SEQUENCES)
    assert worst_difference(mesh_logits(v3, mesh, SEQUENCES, quantization=KEPT), expected) <= 1e-4


def test_w7_each_rank_reads_its_scales_alone(v3: Path) -> None:
    runs = run_mesh(v3, Mesh(tp=2, expert_parallel=True), SEQUENCES, quantization=KEPT)
    for expert, rank in ((1, 0), (6, 1)):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale_inv"
        assert [run.report.tensors[name].status for run in runs] == [("loaded", "ignored")[r != rank] for r in range(2)]
    assert all(run.report.unaccounted() == [] for run in runs)


def test_auto_says_why_it_dequantises_on_a_device_without_fp8(v3: Path) -> None:
    resolution = resolve(str(v3))
    build_model(resolution)
    assert said(resolution.trace) == (
        "dequantised to bfloat16 while streaming [no kernel set multiplies them on cpu; "
        "quantization=fp8 keeps them, at the cost of time]"
    )


def test_modules_not_to_convert_are_held_plain(v3: Path, tmp_path: Path) -> None:
    """C11: by the config's own list; the rest is kept."""
    path = Path(shutil.copytree(v3, tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".layers.1." in name and name.endswith("scale_inv")]:
        scales, weight = tensors.pop(name), name.removesuffix("_scale_inv")
        wide = scales.repeat_interleave(ROWS, 0).repeat_interleave(COLUMNS, 1)
        shape = tensors[weight].shape
        tensors[weight] = (tensors[weight].float() * wide[: shape[0], : shape[1]]).float()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    block = {"quant_method": "fp8", "weight_block_size": [ROWS, COLUMNS]}
    with pytest.raises(
        WeightsError, match=r"layers\.1\.[a-z_.]+weight is float32, the model wants float8|no tensor for"
    ):
        run(configure(path, quantization_config=block), quantization=KEPT)
    block["modules_to_not_convert"] = ["model.layers.1"]
    found = run(configure(path, quantization_config=block), quantization=KEPT)
    assert not any(".layers.1." in name for name in found.held)
    assert any(".layers.2.mlp.experts" in name for name in found.held)
    assert worst_difference(found.logits, run(v3).logits) <= 1e-4


@pytest.mark.parametrize("quantization", [None, KEPT])
@pytest.mark.parametrize("what", ["missing", "shape"])
def test_missing_and_misshapen_scales_are_named(quantization: str | None, what: str, v3: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    path = Path(shutil.copytree(v3, tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    tensors[name] = torch.cat((tensors[name], tensors[name]))
    if what == "missing":
        del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    expected = {
        "missing": rf"experts\.3\.up_proj\.weight is float8_e4m3fn, and .*{name}, is absent",
        "shape": rf"{name} is float32 \[2, 2\]; .*\[32, 64\] in blocks of 48 × 40 needs .*\[1, 2\]",
    }
    with pytest.raises(WeightsError, match=expected[what]):
        LLM(str(path), quantization=quantization)


def test_8_bits_of_another_kind_are_not_converted_to_these(v3: Path) -> None:
    """Casting e5m2, or a plain weight, to e4m3 would lose most of it."""
    resolution = resolve(str(v3), quantization=KEPT, hf_overrides={"quantization_config": {"fmt": "e5m2"}})
    module = build_model(resolution).module
    with pytest.raises(WeightsError, match="is float8_e4m3fn, the model wants float8_e5m2"):
        load_weights(module, resolution, device="cpu")


def test_dummy_weights_run_kept(v3: Path) -> None:
    found = run(v3, quantization=KEPT, load_format="dummy")
    assert found.held
    assert all(bool(torch.isfinite(rows).all()) for rows in found.logits)
