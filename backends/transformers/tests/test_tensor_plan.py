"""X5, CASES 32 and 35: which style each linear gets, and from where."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from modelbay.trace import Trace
from modelbay_testing.tiny_configs import tiny_config
from modelbay_transformers import dispatch
from modelbay_transformers.division import COLWISE, GATHER, ROWWISE, SPLIT_INPUT, WHOLE
from modelbay_transformers.meta import build_on_meta
from modelbay_transformers.plans import pattern_of
from modelbay_transformers.probe import probe
from modelbay_transformers.tensor_plan import TensorPlan, plan_tensors, say_tensor_plan


def base_of(model_type: str, **overrides: Any) -> Any:
    dispatch.register()
    config = tiny_config(model_type, **overrides)
    found = MODEL_MAPPING[type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    return build_on_meta(cls, config, dispatch.ATTENTION, torch.float32)


def plan_of(base: Any, size: int = 2, config: Any = None) -> tuple[TensorPlan, dict[str, str], dict[str, str]]:
    """The plan; pattern -> style; pattern -> source."""
    found = probe(base)
    plan = plan_tensors(base, config or base.config, size, found.attention, found.linears, set())
    styles = {pattern_of(name): plan.division.styles.get(name, WHOLE) for name in found.linears}
    sources = {pattern_of(name): plan.sources.get(name, "replicated") for name in found.linears}
    return plan, styles, sources


def last(styles: dict[str, str]) -> dict[str, str]:
    return {name.rpartition(".")[2]: style for name, style in styles.items()}


def test_x5_a_plan_of_the_config_is_followed() -> None:
    plan, styles, sources = plan_of(base_of("llama"))
    assert last(styles) == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), COLWISE),
        **dict.fromkeys(("o_proj", "down_proj"), ROWWISE),
    }
    assert set(sources.values()) == {"plan"}
    assert {(local.num_heads, local.num_kv_heads) for local in plan.attention.values()} == {(2, 1)}


def test_x5_without_a_plan_styles_are_inferred() -> None:
    plan, styles, sources = plan_of(base_of("bert"))
    assert styles == {
        "encoder.layer.*.attention.self.query": COLWISE,
        "encoder.layer.*.attention.self.key": COLWISE,
        "encoder.layer.*.attention.self.value": COLWISE,
        "encoder.layer.*.attention.output.dense": ROWWISE,
        "encoder.layer.*.intermediate.dense": COLWISE,
        "encoder.layer.*.output.dense": ROWWISE,
        "pooler.dense": WHOLE,
    }
    assert set(sources.values()) == {"inferred", "replicated"}
    trace = Trace()
    say_tensor_plan(trace, base_of("bert"), plan, plan.division.styles)
    assert trace.find("encoder.layer.*.output.dense").source == "inferred"
    assert trace.find("embeddings.word_embeddings.weight").source == "replicated"


def test_x5_sinks_of_each_head_are_split_with_the_heads() -> None:
    plan, styles, _ = plan_of(base_of("gpt_oss"))
    assert {pattern_of(name) for name in plan.division.parameters} == {"layers.*.self_attn.sinks"}
    assert last(styles)["o_proj"] == ROWWISE


def test_x5_a_norm_over_all_heads_keeps_them_together() -> None:
    """OLMo 2: its plan gathers, and were it not to, what is split would be seen to be wrong."""
    base = base_of("olmo2")
    plan, styles, _ = plan_of(base)
    assert last(styles)["q_proj"] == GATHER
    assert last(styles)["o_proj"] == SPLIT_INPUT
    config = copy.deepcopy(base.config)
    colwise = {name: style.replace("_gather_output", "") for name, style in config.base_model_tp_plan.items()}
    config.base_model_tp_plan = {name: style.replace("_split_input", "") for name, style in colwise.items()}
    _, again, _ = plan_of(base_of("olmo2"), config=config)
    assert last(again)["q_proj"] == last(again)["k_proj"] == GATHER
    assert {(local.num_heads, local.num_kv_heads) for local in plan.attention.values()} == {(4, 2)}


def test_x5_heads_counted_by_an_attribute_are_those_of_a_rank() -> None:
    plan, styles, _ = plan_of(base_of("opt"))
    assert last(styles)["q_proj"] == COLWISE
    assert {values["num_heads"] for values in plan.division.attributes.values()} == {2}


def test_x5_a_fused_projection_is_split_by_its_sections() -> None:
    plan, styles, _ = plan_of(base_of("modernbert"))
    assert last(styles)["Wqkv"] == COLWISE
    sections = {pattern_of(name): sizes for name, sizes in plan.division.sections.items()}
    assert sections["layers.*.attn.Wqkv"] == (64, 64, 64)


def test_x5_latent_attention_is_split_by_heads() -> None:
    plan, styles, _ = plan_of(base_of("deepseek_v3"))
    assert last(styles)["q_b_proj"] == last(styles)["kv_b_proj"] == COLWISE
    assert last(styles)["q_a_proj"] == last(styles)["kv_a_proj_with_mqa"] == WHOLE
    assert {local.num_heads for local in plan.attention.values()} == {2}


def test_case32_fewer_kv_heads_than_ranks_are_held_by_several() -> None:
    plan, styles, _ = plan_of(base_of("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=8), size=4)
    assert last(styles)["k_proj"] == COLWISE
    assert {pattern_of(name): parts for name, parts in plan.division.parts.items()} == {
        "layers.*.self_attn.k_proj": 2,
        "layers.*.self_attn.v_proj": 2,
    }
    assert {(local.num_heads, local.num_kv_heads) for local in plan.attention.values()} == {(2, 1)}


def test_case35_a_plan_in_a_sub_config_is_for_its_part_of_the_model() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.config = type("OuterConfig", (), {"sub_configs": {"text_config": None}, "text_config": inner.config})()
            self.language_model = inner

        def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            return self.language_model(input_ids=input_ids, position_ids=position_ids, **kwargs)

    base = Outer(base_of("llama"))
    _, styles, sources = plan_of(base)
    assert styles["language_model.layers.*.mlp.down_proj"] == ROWWISE
    assert set(sources.values()) == {"plan"}


def test_x5_a_pattern_matches_whole_names_alone() -> None:
    """CASES 35: ``q_proj`` alone names nothing that is deeper."""
    base = base_of("llama")
    config = copy.deepcopy(base.config)
    config.base_model_tp_plan = {"q_proj": COLWISE, "layers.*.o_proj": ROWWISE}
    _, _, sources = plan_of(base, config=config)
    assert "plan" not in sources.values()


def test_x5_nothing_to_divide_is_left_whole() -> None:
    plan, styles, _ = plan_of(base_of("gpt2"))
    assert not plan.divided
    assert not styles


def test_x5_widths_that_do_not_divide_are_whole_and_say_so() -> None:
    plan, styles, _ = plan_of(base_of("llama", intermediate_size=130, num_key_value_heads=4), size=4)
    assert last(styles)["gate_proj"] == last(styles)["down_proj"] == WHOLE
    assert last(styles)["q_proj"] == COLWISE
    assert "do not divide over 4" in plan.reasons["layers.*.mlp.gate_proj"]
