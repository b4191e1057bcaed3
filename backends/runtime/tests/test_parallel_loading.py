"""W7, X6, X7, D2: each rank from one checkpoint on disk: what it reads, by which rule it passes over the rest, and what
comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelbay.errors import WeightsError
from modelbay.weights.safetensors import SafetensorsSource
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_testing.logits import transformers_logits, worst_difference
from modelbay_testing.parallel import mesh_logits, run_mesh
from modelbay_testing.tiny import tiny_checkpoint

SEQUENCES = [[5, 9, 200, 31, 7, 88, 120], [3, 4, 5, 6, 250]]
LLAMA = {"num_hidden_layers": 5, "vocab_size": 253, "attention_bias": True, "mlp_bias": True}
EXPERTS = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
}  # fmt: skip


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: object) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**values, **config}), encoding="utf-8")
    return path


def on_disk(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "mesh", [Mesh(tp=2), Mesh(tp=4), Mesh(pp=2), Mesh(pp=4), Mesh(tp=2, pp=2), Mesh(dp=2), Mesh(dp=2, tp=2)], ids=str
)
def test_d2_logits_over_ranks_are_transformers_own(mesh: Mesh, tied: bool, tmp_path: Path) -> None:
    """A vocabulary that no size divides, two KV heads at TP 4, five layers in four stages, biases everywhere."""
    path = tiny_checkpoint(tmp_path / "m", "llama", tie_word_embeddings=tied, **LLAMA)
    expected = transformers_logits(path, [[*ids, 0] for ids in SEQUENCES])
    assert worst_difference(mesh_logits(path, mesh, SEQUENCES), expected) <= 1e-4


class _Counting:
    """Counts the bytes that are handed out, whatever the report says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[str, int] = {}
        read = SafetensorsSource.read

        def counting(source: SafetensorsSource, name: str, index: Any = None) -> torch.Tensor:
            tensor = read(source, name, index)
            self.read[name] = self.read.get(name, 0) + tensor.nbytes
            return tensor

        monkeypatch.setattr(SafetensorsSource, "read", counting)


@pytest.mark.parametrize("ranks", [2, 4])
def test_w7_a_rank_reads_its_own_slices_and_no_more(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path / "m", "llama", num_key_value_heads=4, **LLAMA)
    counting = _Counting(monkeypatch)
    runs = run_mesh(path, Mesh(tp=ranks), [[3, 4]])
    for name, tensor in on_disk(path).items():
        whole = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        assert counting.read[name] == tensor.nbytes * (ranks if whole else 1), name
    assert sum(run.report.bytes_read for run in runs) == pytest.approx(sum(counting.read.values()), abs=ranks)
    for run in runs:
        assert run.report.unaccounted() == []
        assert {use.status for use in run.report.tensors.values()} == {"loaded"}


def fuse_qkv(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(LLAMA["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            at = f"model.layers.{layer}.self_attn."
            tensors[f"{at}qkv_proj.{kind}"] = torch.cat([tensors.pop(f"{at}{part}_proj.{kind}") for part in "qkv"])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_w7_a_fused_qkv_on_disk_is_cut_into_its_sections(
    kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At TP 2, with each KV head on one rank, or both ranks having the one there is: never the first half of q|k|v."""
    path = tiny_checkpoint(tmp_path / "m", "llama", num_key_value_heads=kv_heads, **LLAMA)
    expected = transformers_logits(path, [[*ids, 0] for ids in SEQUENCES])
    rewrite(path, fuse_qkv)
    counting = _Counting(monkeypatch)
    assert worst_difference(mesh_logits(path, Mesh(tp=2), SEQUENCES), expected) <= 1e-4
    name = "model.layers.0.self_attn.qkv_proj.weight"
    twice = 2 * 16 * 64 * 4 if kv_heads == 1 else 0  # k and v of the one head
    assert counting.read[name] == on_disk(path)[name].nbytes + twice


def pack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """As Transformers holds them in memory, and some checkpoints have them on disk."""
    for layer in (1, 2):
        at = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([tensors.pop(f"{at}{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{at}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{at}down_proj"] = parts["down"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "mesh",
    [Mesh(tp=2), Mesh(tp=2, expert_parallel=True), Mesh(dp=2, expert_parallel=True),
     Mesh(tp=2, pp=2, expert_parallel=True)],
    ids=str,
)  # fmt: skip
def test_case_37_experts_of_other_ranks_are_never_read(
    mesh: Mesh, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 37, X7: both layouts on disk give the same output; each byte of an expert is read once over all ranks."""
    path = tiny_checkpoint(tmp_path / "m", "deepseek_v2", **EXPERTS)
    expected = transformers_logits(path, [[*ids, 0] for ids in SEQUENCES])
    if packed:
        rewrite(path, pack_experts)
    counting = _Counting(monkeypatch)
    assert worst_difference(mesh_logits(path, mesh, SEQUENCES), expected) <= 1e-4
    found = {name: size for name, size in counting.read.items() if ".experts." in name}
    assert found == {name: tensor.nbytes for name, tensor in on_disk(path).items() if ".experts." in name}
    rules = [set(run.report.ignored_by_rule()) for run in run_mesh(path, mesh, [[3, 4]])]
    wanted = {"another stage"} if mesh.pp > 1 else set()
    wanted |= {"another rank's expert"} if mesh.expert_parallel and not packed else set()
    assert rules == [wanted] * mesh.size


def test_x6_absent_layers_are_not_read_and_unknown_tensors_are_still_found(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "m", "llama", **LLAMA)
    first, last = reversed(run_mesh(path, Mesh(pp=2), [[3, 4]]))
    for run, layers in ((first, {0, 1, 2}), (last, {3, 4})):
        used = {name for name, use in run.report.tensors.items() if use.status == "loaded"}
        assert {int(name.split(".")[2]) for name in used if ".layers." in name} == layers
        assert set(run.built.kv_specs) == layers
        assert ("model.embed_tokens.weight" in used) is run.context.is_first_stage
        assert ("lm_head.weight" in used) is ("model.norm.weight" in used) is run.context.is_last_stage
    rewrite(path, lambda tensors: tensors.update({"model.layers.4.extra.weight": torch.ones(2)}))
    with pytest.raises(WeightsError, match=r"model\.layers\.4\.extra\.weight"):
        run_mesh(path, Mesh(pp=2), [[3, 4]])


def test_w5_a_tied_head_over_stages(tmp_path: Path) -> None:
    """Both ends have the one parameter, whichever of its two names is on disk; two that differ are refused."""
    path = tiny_checkpoint(tmp_path / "m", "llama", tie_word_embeddings=True, **LLAMA)
    expected = transformers_logits(path, [[*ids, 0] for ids in SEQUENCES])

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(path, rename)
    for mesh in (Mesh(pp=2), Mesh(tp=2, pp=3)):
        assert worst_difference(mesh_logits(path, mesh, SEQUENCES), expected) <= 1e-4
    rewrite(path, lambda tensors: tensors.update({"model.embed_tokens.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(WeightsError, match="tie_word_embeddings is true"):
        run_mesh(path, Mesh(pp=2), [[3, 4]])


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=2, expert_parallel=True), Mesh(pp=2)], ids=str)
def test_w7_of_a_scaled_tensor_the_blocks_that_are_needed(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 with a scale for each block, cut across blocks: the values of the whole, dequantised, then cut."""
    path = tiny_checkpoint(tmp_path / "m", "deepseek_v2", dtype="bfloat16", **EXPERTS)
    rows, columns = 24, 40

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name].float()
            scales = torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) + 0.5
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales

    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]}
    rewrite(path, quantise, quantization_config=blocks)
    whole = mesh_logits(path, Mesh(), SEQUENCES)
    counting = _Counting(monkeypatch)
    assert worst_difference(mesh_logits(path, mesh, SEQUENCES), whole) <= 1e-4
    name = "model.layers.0.mlp.up_proj.weight"  # 128 rows; at TP 2 the second half begins within a block
    again = (64 - 48) * 64 if mesh.tp == 2 else 0
    assert counting.read[name] == 128 * 64 + again
