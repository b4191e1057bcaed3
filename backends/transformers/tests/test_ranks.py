"""D2, X5 to X9: Transformers models over several ranks compute what one process of Transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelbay import resolve
from modelbay.errors import BackendError
from modelbay_runtime.build import build_model
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_testing.logits import transformers_logits, worst_difference
from modelbay_testing.parallel import RankRun, mesh_logits, run_mesh
from modelbay_testing.tiny import tiny_checkpoint, tiny_tokenizer

SEQUENCES = [[5, 6, 7, 8], list(range(9, 42)), list(range(100, 121))]
TP2, TP4, PP2, EP2 = Mesh(tp=2), Mesh(tp=4), Mesh(pp=2), Mesh(tp=2, expert_parallel=True)
TP2_PP2 = Mesh(tp=2, pp=2)
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16, "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0, "tie_word_embeddings": True,
    },
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "olmo2": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bart": {
        "scale_embedding": True, "is_encoder_decoder": False, "decoder_layers": 2, "encoder_layers": 2,
        "decoder_attention_heads": 4, "decoder_ffn_dim": 128,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Ranks are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(path: Path, mesh: Mesh, **arguments: Any) -> None:
    """Every rank's logits are Transformers' own (which gives one less than there are tokens)."""
    expected = transformers_logits(path, [[*ids, 0] for ids in SEQUENCES])
    found = mesh_logits(path, mesh, SEQUENCES, **engine(mesh), **arguments)
    assert worst_difference(found, expected) <= 1e-4


def engine(mesh: Mesh) -> dict[str, Any]:
    return {
        "model_impl": "transformers", "max_model_len": 128, "tensor_parallel_size": mesh.tp,
        "pipeline_parallel_size": mesh.pp, "data_parallel_size": mesh.dp,
        "enable_expert_parallel": mesh.expert_parallel,
    }  # fmt: skip


def checkpoint(tmp_path: Path, model_type: str, **overrides: Any) -> Path:
    return tiny_checkpoint(tmp_path / model_type, model_type, std=0.15, **{**SMALL[model_type], **overrides})


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gemma2",
        "gpt_oss",
        "cohere",
        *(pytest.param(n, marks=pytest.mark.deep) for n in ("phi", "phi3", "olmo2")),
    ],
)
def test_x5_tensor_parallel(model_type: str, tmp_path: Path) -> None:
    """Planned and inferred; soft-caps and windows; sinks; norms in and over heads; biased, scaled, tied heads."""
    check(checkpoint(tmp_path, model_type), TP2)


@pytest.mark.parametrize(
    "model_type", ["gemma2", "opt", *(pytest.param(n, marks=pytest.mark.deep) for n in ("llama", "gpt_oss"))]
)
def test_x6_stages(model_type: str, tmp_path: Path) -> None:
    """A tied embedding on both ends, a normalizer between embedding and layers, windows by the layer's place."""
    check(checkpoint(tmp_path, model_type, num_hidden_layers=2), PP2)


def test_x6_four_stages_and_the_layers_that_each_reads(tmp_path: Path) -> None:
    """Seven layers on four stages: the end has the one less. What a stage lacks is neither built nor read."""
    path = checkpoint(tmp_path, "gemma2", num_hidden_layers=7)
    mesh = Mesh(pp=4)
    ran = run_mesh(path, mesh, SEQUENCES, **engine(mesh))
    expected = transformers_logits(path, [[*ids, 0] for ids in SEQUENCES])
    by_stage: dict[int, RankRun] = {run.context.place.pp_rank: run for run in ran}
    assert worst_difference(by_stage[3].logits or [], expected) <= 1e-4
    layers = [sorted(by_stage[stage].built.kv_specs) for stage in range(4)]
    assert [layer for stage in layers for layer in stage] == list(range(7))
    assert max(map(len, layers)) - min(map(len, layers)) == 1
    for stage, run in by_stage.items():
        names = {name for name, _ in run.built.module.named_parameters()}
        held = {int(name.split(".")[2]) for name in names if ".layers." in name}
        assert held == set(layers[stage])
        assert any("embed_tokens" in name for name in names) == (stage in (0, 3))
        assert ("model.norm.weight" in names) == (stage == 3)


def test_d1_stages_of_ranks(tmp_path: Path) -> None:
    check(checkpoint(tmp_path, "qwen3_moe"), TP2_PP2)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["gemma2", "opt", pytest.param("bart", marks=pytest.mark.deep)])
def test_x6_the_table_of_tokens_on_stages_of_ranks(model_type: str, tied: bool, tmp_path: Path) -> None:
    """Plain, or with a scale of its own: the last stage has its part for a tied head, and otherwise nothing of it."""
    path = checkpoint(tmp_path, model_type, num_hidden_layers=2, tie_word_embeddings=tied)
    ran = run_mesh(path, TP2_PP2, SEQUENCES, **engine(TP2_PP2))
    expected = transformers_logits(path, [[*ids, 0] for ids in SEQUENCES])
    for run in ran:
        last = run.context.place.pp_rank == 1
        if last:
            assert worst_difference(run.logits or [], expected) <= 1e-4
        tables = [p for name, p in run.built.module.named_parameters() if name.endswith("embed_tokens.weight")]
        assert [len(table) for table in tables] == ([128] if tied or not last else [])


def test_case32_kv_heads_held_by_several_ranks(tmp_path: Path) -> None:
    check(checkpoint(tmp_path, "qwen3_moe", num_key_value_heads=2), TP4)


def test_case32_x9_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    """253 rows on four ranks: three of padding, none to be seen."""
    path = checkpoint(tmp_path, "phi", vocab_size=253)
    check(path, TP4)
    [first, *_] = run_mesh(path, TP4, SEQUENCES, **engine(TP4))
    assert first.logits is not None
    assert first.logits[0].shape[-1] == 253


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_x7_experts_split_over_ranks(model_type: str, tmp_path: Path) -> None:
    """By the runtime's experts; where they compute otherwise (clamped, interleaved, biased), by parts of them."""
    path = checkpoint(tmp_path, model_type)
    check(path, EP2)
    [run, _] = run_mesh(path, EP2, SEQUENCES[:1], **engine(EP2))
    experts = next(m for name, m in run.built.module.named_modules() if name.endswith("experts"))
    assert len(experts.down_proj) == 2


def test_x7_replicas_exchange_tokens(tmp_path: Path) -> None:
    check(checkpoint(tmp_path, "qwen3_moe"), Mesh(dp=2, expert_parallel=True))


@pytest.mark.deep
def test_x7_replicas_and_shares_exchange_tokens(tmp_path: Path) -> None:
    check(checkpoint(tmp_path, "qwen3_moe", num_experts=8), Mesh(dp=2, tp=2, expert_parallel=True))


@pytest.mark.parametrize("mesh", [TP2, PP2], ids=str)
def test_x5_an_encoder(mesh: Mesh, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertModel(config, add_pooling_layer=False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path)
    arguments = {**engine(mesh), "max_model_len": 64, "runner": "pooling"}
    found = mesh_logits(tmp_path, mesh, SEQUENCES, decoded=0, **arguments)
    with torch.inference_mode():
        expected = [model(torch.tensor([ids])).last_hidden_state[0] for ids in SEQUENCES]
    assert worst_difference(found, expected) <= 1e-4


def build(path: Path, mesh: Mesh) -> Any:
    resolution = resolve(str(path), dtype="float32", device="cpu", **engine(mesh))
    return build_model(resolution, ParallelContext.apart(mesh, mesh.place(0))), resolution


def test_x5_each_kind_of_parameter_is_in_the_trace(tmp_path: Path) -> None:
    _, resolution = build(checkpoint(tmp_path, "gpt_oss"), TP2)
    answers = {d.question: (d.answer, d.source) for d in resolution.trace.decisions if d.stage == "plan"}
    assert answers["layers.*.self_attn.q_proj"] == ("colwise × 2", "inferred")
    assert answers["layers.*.self_attn.sinks"] == ("split by heads × 2", "inferred")
    assert answers["layers.*.input_layernorm.weight"] == ("replicated × 2", "replicated")
    assert "experts split" in answers["layers.*.mlp.experts"][0]


def test_x5_nothing_planned_and_nothing_inferred_is_refused_before_loading(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=128)
    with pytest.raises(BackendError, match=r"no tensor parallel plan .* none could be inferred"):
        build(path, TP2)


def test_x6_layers_that_need_token_ids_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Model

    forward = Olmo2Model.forward

    def adding(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        output = forward(self, input_ids=input_ids, position_ids=position_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state + self.embed_tokens(input_ids)
        return output

    path = checkpoint(tmp_path, "olmo2")
    monkeypatch.setattr(Olmo2Model, "forward", adding)
    resolution = resolve(str(path), dtype="float32", device="cpu", **engine(PP2))
    with pytest.raises(BackendError, match="adds something of the first stage"):
        build_model(resolution, ParallelContext.apart(PP2, PP2.place(0)))


def test_x6_a_layer_that_gets_more_than_the_one_before_gives_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

    forward = Olmo2DecoderLayer.forward
    monkeypatch.setattr(
        Olmo2DecoderLayer,
        "forward",
        lambda self, hidden_states, **kwargs: (forward(self, hidden_states, **kwargs), 0)[0],
    )
    path = checkpoint(tmp_path, "olmo2")
    build(path, PP2)  # the same, told otherwise
    call = Olmo2DecoderLayer.__call__
    monkeypatch.setattr(Olmo2DecoderLayer, "__call__", lambda self, x, **kwargs: call(self, x * 1.0, **kwargs))
    with pytest.raises(BackendError, match="not given what the layer before it gives"):
        build(path, PP2)


@pytest.mark.parametrize("rank", [0, 1])
def test_x6_a_model_that_looks_inside_its_layers_is_refused_with_the_reason(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On whichever stage: as a whole it runs, and a layer that is left out has nothing to look at."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Model

    xmod = tiny_checkpoint(tmp_path / "xmod", "xmod", default_language="en_XX", is_decoder=True)
    olmo2 = checkpoint(tmp_path, "olmo2")
    forward = Olmo2Model.forward

    def looking(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        assert len(self.layers[0].mlp.down_proj.weight) == len(self.layers[1].mlp.down_proj.weight)
        return forward(self, input_ids=input_ids, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(Olmo2Model, "forward", looking)
    said = {xmod: "XmodModel looks inside its layers (XmodLayer.output)"}
    said[olmo2] = "Olmo2Model looks inside its layers (Olmo2DecoderLayer.mlp)"
    for path, text in said.items():
        resolution = resolve(str(path), dtype="float32", device="cpu", **engine(PP2))
        context = ParallelContext.apart(PP2, PP2.place(rank))
        if path == xmod and context.place.pp_rank == 0:
            build_model(resolution, context)  # it looks at the first layer, which is here
            continue
        with pytest.raises(BackendError) as error:
            build_model(resolution, context)
        assert text in error.value.message
        assert "none of them can be left out: no stages" in error.value.message
