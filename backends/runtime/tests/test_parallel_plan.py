"""D1: `modelbay plan`, and explain's rows: what they say is what the ranks that would run hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from modelbay import resolve
from modelbay.cli.main import run
from modelbay.errors import PluginError
from modelbay.specs import ArchSpec
from modelbay_runtime.build import build_model
from modelbay_runtime.layers.embedding import Embedding
from modelbay_runtime.layers.moe import Experts
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.holdings import holdings
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.plan import check_plan

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2,
    "torch_dtype": "bfloat16", "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 8,
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 1,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def write(**config: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(tmp_path)

    return write


def own_elements(module: nn.Module) -> int:
    tied = {id(m.weight) for m in module.modules() if getattr(m, "tied_to", None)}
    return sum(p.numel() for p in module.parameters() if id(p) not in tied)


def test_any_number_of_replicas_is_a_short_answer(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    path = model(**LLAMA)
    assert run(["plan", path, "--dp", "10000", "--tp", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "ranks 0, 2, 4, 6," in first
    assert "… 19998 (10,000): layers 0-4" in first
    assert "… 19999 (10,000): layers 0-4" in second
    assert len(first) < 400
    assert run(["plan", path, "--dp", "99999999999999"]) == 2
    assert "at most 1,048,576 ranks are planned" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (LLAMA, Mesh()),
        (LLAMA, Mesh(tp=4)),  # two KV heads, 131 tokens
        (LLAMA, Mesh(dp=2, pp=3, tp=2)),
        (DEEPSEEK, Mesh(tp=2, pp=2)),
        (DEEPSEEK, Mesh(tp=2, pp=2, expert_parallel=True)),
        (DEEPSEEK, Mesh(dp=2, tp=2, expert_parallel=True)),
    ],
    ids=str,
)
def test_d1_every_rank_is_as_it_would_be_built(config: dict, mesh: Mesh, tied: bool, model: Any) -> None:
    """The table is made from one module for each stage; here every rank is built."""
    resolution = resolve(model(**config, tie_word_embeddings=tied), device="cpu")
    found = holdings(resolution, mesh)
    alone = build_model(resolution, ParallelContext())
    assert found.parameters == own_elements(alone.module)
    assert found.held == found.parameters + found.copies + found.padding
    held = 0
    for rank in found.ranks:
        place = mesh.place(rank.rank)
        built = build_model(resolution, ParallelContext.apart(mesh, place))
        assert (rank.replica, rank.stage, rank.share) == (place.dp_rank, place.pp_rank, place.tp_rank)
        assert rank.parameters == own_elements(built.module)
        assert rank.weight_bytes == built.parameter_bytes()
        assert rank.kv_bytes == 2 * sum(spec.row for spec in built.kv_specs.values())
        assert list(range(*rank.layers)) == sorted(built.kv_specs)
        held += rank.parameters
        for module in built.module.modules():
            if isinstance(module, Experts) and mesh.expert_parallel:
                assert rank.experts == (module.first, module.first + module.held)
            if isinstance(module, Embedding) and mesh.tp > 1:
                assert rank.tokens == (module.first, module.first + module.held)
        names = {name.rpartition(".")[0] for name, _ in built.module.named_parameters() if ".layers." not in name}
        shared = {"lm_head"} if tied and "model.embed_tokens" in names else set()
        assert set(rank.outside) == names - shared
    assert held == found.held
    if mesh == Mesh(tp=4):
        assert found.padding == (2 - tied) * (33 * 4 - 131) * 64


def test_active_parameters_by_their_formula(model: Any) -> None:
    resolution = resolve(model(**DEEPSEEK), device="cpu")
    active = holdings(resolution, Mesh(pp=2)).active
    built = build_model(resolution, ParallelContext())
    experts = sum(p.numel() for m in built.module.modules() if isinstance(m, Experts) for p in m.parameters())
    everything = own_elements(built.module)
    assert active is not None
    assert active.with_embedding == everything - experts * 5 // 8
    assert active.without_embedding == active.with_embedding - 131 * 64
    assert f"{experts:,} of experts × (8 - 3) / 8" in active.formula


def test_the_command_says_who_holds_what(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*arguments: str) -> str:
        assert run(["plan", model(**DEEPSEEK), *arguments]) == 0
        return capsys.readouterr().out

    text = plan("--tp", "2", "--pp", "2", "--ep")
    assert "4 ranks = 1 replica × 2 stages × 2 shares, experts over 2" in text
    assert "rank 0: layers 3-4, experts 0-3, norm, lm_head, tokens 0-65;" in text
    assert "rank 3: layers 0-2, experts 4-7, embed_tokens, tokens 66-130;" in text
    data = json.loads(plan("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--json"))
    assert sum(rank["parameters"] for rank in data["ranks"]) == data["held"]
    assert [rank["experts"] for rank in data["ranks"]] == [None] * 4  # each of them is sliced
    many = plan("--dp", "8", "--pp", "5", "--ep")
    assert "stage 4, each of 8 ranks: layer 4, 1 expert, norm, lm_head;" in many


@pytest.mark.parametrize("tied", [False, True])
def test_the_command_says_once_what_is_active_of_a_dense_model(
    tied: bool, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", model(**LLAMA, tie_word_embeddings=tied)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith(": 1 rank = 1 replica × 1 stage × 1 share")
    [active] = [line for line in lines if "active per token" in line]
    everything = own_elements(build_model(resolve(model(**LLAMA, tie_word_embeddings=tied))).module)
    less = f"{everything - 131 * 64:,}, {everything:,} with the input embedding = {everything:,} in all - 8,384 of"
    assert active.startswith(f"  active per token: {'all of them' if tied else less}")


def test_the_command_refuses_what_does_not_divide(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model(**DEEPSEEK), "--tp", "3", "--dp", "3", "--ep"]) == 2
    error = capsys.readouterr().err
    assert "num_attention_heads 8 is not divisible by 3" in error
    assert "8 experts are not divisible by data_parallel_size × tensor_parallel_size = 3 × 3 = 9" in error


def test_x5_explain_shows_every_parameter_s_style(model: Any) -> None:
    resolution = resolve(model(**DEEPSEEK), tensor_parallel_size=2, device="cpu")
    build_model(resolution)
    shown = {d.question: (d.answer, d.source) for d in resolution.trace.decisions if d.stage == "plan"}
    assert shown["layers.*.self_attn.q_proj.weight"] == ("colwise, 96 of 192 along dimension 0 of [192, 64]", "plan")
    assert shown["layers.*.self_attn.kv_a_layernorm.weight"] == ("replicated", "layer")
    assert shown["layers.*.mlp.experts.down_proj"][0] == "rowwise, 16 of 32 along dimension 2 of [8, 64, 32]"
    assert shown["layers.*.mlp.experts.gate_proj"][0].startswith("packed_colwise, 16 of 32 along dimension 1")
    assert shown["embed_tokens.weight"][0] == "embedding_rowwise, 66 of 131 along dimension 0 of [131, 64]"
    assert all(source for _, source in shown.values())


def test_x5_explain_shows_experts_that_are_split_by_number(model: Any) -> None:
    resolution = resolve(model(**DEEPSEEK), tensor_parallel_size=2, enable_expert_parallel=True, device="cpu")
    build_model(resolution)
    shown = {d.question: d.answer for d in resolution.trace.decisions if d.stage == "plan"}
    assert shown["layers.*.mlp.experts.down_proj"] == "grouped_gemm, 4 of 8 along dimension 0 of [8, 64, 32]"
    assert shown["layers.*.mlp.shared_experts.down_proj.weight"].startswith("rowwise, 16 of 32")


def test_a_declared_plan_that_the_layers_do_not_follow_is_refused(model: Any) -> None:
    resolution = resolve(model(**LLAMA), device="cpu")
    module = build_model(resolution).module
    arch = resolution.arch
    assert arch is not None
    check_plan(module, arch)
    wrong = {**arch.tp_plan, "layers.*.self_attn.q_proj": "rowwise"}
    with pytest.raises(PluginError, match=r"'layers\.0\.self_attn\.q_proj' is colwise, and the tp_plan .* rowwise"):
        check_plan(module, ArchSpec(name="Wrong", target="x:Y", tp_plan=wrong))
    short = {name: style for name, style in arch.tp_plan.items() if name != "lm_head"}
    with pytest.raises(PluginError, match=r"'lm_head' is colwise_gather_output, and .* says nothing"):
        check_plan(module, ArchSpec(name="Short", target="x:Y", tp_plan=short))
