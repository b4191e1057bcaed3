"""Each rule for custom models broken once: refused before any weight is read, and the error names the rule.

The folders here have no weights at all, so nothing that gets past its rule could go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from modelbay import resolve
from modelbay.errors import ArchitectureError, ConfigError, ModelbayError, WeightsError
from modelbay_runtime.build import build_model

INTERFACE = """        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
"""
GET_INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface"
CALL = "found, _ = attention_interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)"


@dataclass(frozen=True)
class Broken:
    """An example, what is changed in it, and what the error must say."""

    name: str
    changes: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()


RULES = {
    # 1. MyAttention calls attention through ALL_ATTENTION_FUNCTIONS, exactly once, and has a layer_idx of its own.
    "the interface is not asked for": Broken(
        "grove",
        {INTERFACE: "        attention_interface = eager_attention_forward\n"},
        says=("auto_map.AutoModel = modeling_grove.GroveModel", "ALL_ATTENTION_FUNCTIONS.get_interface"),
    ),
    "the interface is asked for and never called": Broken(
        "grove",
        {CALL: CALL.replace("attention_interface(", "eager_attention_forward(")},
        says=("layers.0.self_attn (GroveAttention) mixes tokens outside of attention", GET_INTERFACE),
    ),
    "one of the layers never calls it": Broken(
        "grove",
        {CALL: f"{CALL} if self.layer_idx == 0 else eager_attention_forward(\n            self, query, key, value, "
               "attention_mask, scaling=self.scaling)"},
        says=("layers.1.self_attn (GroveAttention) mixes tokens outside of attention", GET_INTERFACE),
    ),
    "called twice": Broken(
        "grove",
        {CALL: f"{CALL}\n        {CALL}"},
        says=("layers.0.self_attn calls attention more than once",),
    ),
    "no layer_idx": Broken(
        "grove",
        {"        self.layer_idx = layer_idx\n": ""},
        says=("layers.0.self_attn has no integer layer_idx",),
    ),
    "a layer_idx that is no int": Broken(
        "grove",
        {"self.layer_idx = layer_idx": "self.layer_idx = f'layer {layer_idx}'"},
        says=("layers.0.self_attn has no integer layer_idx", "'layer 0'"),
    ),
    "one layer_idx for all": Broken(
        "grove",
        {"self.layer_idx = layer_idx": "self.layer_idx = 0"},
        says=("layers.1.self_attn and layers.0.self_attn have the same layer_idx 0",),
    ),
    "an argument that nobody knows": Broken(
        "grove",
        {CALL: CALL.replace("**kwargs", "alibi_slopes=query[0, :, 0, 0], **kwargs")},
        says=("layers.0.self_attn", "alibi_slopes"),
    ),
    "a mask of its own": Broken(
        "grove",
        {CALL: CALL.replace("attention_mask,", "query.new_zeros(1, 1, query.shape[2], query.shape[2]),")},
        says=("GroveAttention brings an attention mask of its own",),
    ),
    # 2. Encoder-only: is_causal = False.
    "some layers causal, some not": Broken(
        "quill",
        {"self.layer_idx = layer_idx\n": "self.layer_idx = layer_idx\n        self.is_causal = layer_idx > 0\n",
         "block(hidden_states, mask, **kwargs)": "block(hidden_states, None, **kwargs)"},
        says=("QuillModel has causal and bidirectional layers",),
    ),
    # 3. Mixture of experts.
    "experts.forward takes something else": Broken(
        "hive",
        {"def forward(self, hidden_states, top_k_index, top_k_weights)": "def forward(self, x, top_k_index, weights)"},
        says=("layers.0.mlp.experts (HiveExperts)", "hidden_states, top_k_index, top_k_weights", "x, top_k_index, "),
    ),
    "experts that are neither a list nor packed": Broken(
        "grove",
        {"torch.empty(self.num_experts, 2 * size, ": "torch.empty(2 * size * self.num_experts, "},
        says=("layers.0.moe.experts (GroveExperts)", "nn.ModuleList", "3-D", "gate_up_proj [256, 64]"),
    ),
    "the experts have another name": Broken(
        "hive",
        {"self.experts = HiveExperts(config)": "self.specialists = HiveExperts(config)",
         "self.experts(flat": "self.specialists(flat"},
        says=("layers.0.mlp.specialists (HiveExperts)", "must have them in an attribute `experts`"),
    ),
    # The base model carries what is special, and auto_map.AutoModel names it.
    "no AutoModel": Broken(
        "lumen",
        config={"auto_map": {"AutoConfig": "configuration_lumen.LumenConfig",
                             "AutoModelForCausalLM": "modeling_lumen.LumenForCausalLM"}},
        says=("auto_map has AutoConfig, AutoModelForCausalLM and no AutoModel", "MyModel, not MyModelForCausalLM"),
    ),
    "AutoModel names the class with the head": Broken(
        "lumen",
        config={"auto_map": {"AutoConfig": "configuration_lumen.LumenConfig",
                             "AutoModel": "modeling_lumen.LumenForCausalLM"}},
        says=("auto_map.AutoModel names LumenForCausalLM", "head", "MyModel, not MyModelForCausalLM"),
    ),
    "the class with the head changes what goes in": Broken(
        "grove",
        {"self.model(input_ids=input_ids, ": "self.model(inputs_embeds=2 * self.model.embed_tokens(input_ids), "},
        says=("GroveForCausalLM calls its base model", "inputs_embeds", "belongs into the base model (GroveModel)"),
    ),
    "the class with the head holds another base": Broken(
        "grove",
        {"self.model = GroveModel(config)": "self.model = type('OtherModel', (GroveModel,), {})(config)"},
        says=("GroveForCausalLM holds a OtherModel", "auto_map.AutoModel names GroveModel"),
    ),
    "no PreTrainedModel": Broken(
        "quill",
        {"class QuillModel(PreTrainedModel)": "class QuillModel(nn.Module)"},
        says=("auto_map.AutoModel = modeling_quill.QuillModel is no transformers.PreTrainedModel",),
    ),
    "no position_ids, and none can be given": Broken(
        "hive",
        {"attention_mask=None, position_ids=None, inputs_embeds": "attention_mask=None, inputs_embeds",
         "        if position_ids is None:\n            position_ids = ": "        position_ids = ",
         "        angles = position_ids": "        hidden_states = hidden_states[:, torch.arange(len(position_ids.T))]"
                                         "\n        angles = position_ids"},
        says=("numbers its tokens itself", "tokens of several sequences cannot share a batch"),
    ),
    # Plans.
    "an unknown style": Broken(
        "lumen",
        {'"layers.*.mlp.up_proj": "colwise"': '"layers.*.mlp.up_proj": "columnwise"'},
        says=("LumenConfig.base_model_tp_plan", "'layers.*.mlp.up_proj'", "'columnwise'", "'colwise'"),
    ),
    "a stage that is no direct child": Broken(
        "lumen",
        {'"norm": ([': '"layers.0": (['},
        says=("LumenConfig.base_model_pp_plan names 'layers.0'", "no direct child", "embed_tokens, layers, norm"),
    ),
    "two lists of layers": Broken(
        "quill",
        {'"final_norm": ([': '"more": ([',
         "        self.final_norm =": "        self.more = nn.ModuleList([])\n        self.final_norm ="},
        says=("QuillConfig.base_model_pp_plan", "exactly one nn.ModuleList", "blocks, more"),
    ),
    "no list of layers": Broken(
        "lumen",
        {'"layers": (["hidden_states", "attention_mask"], ["hidden_states"]),\n': ""},
        says=("LumenConfig.base_model_pp_plan", "exactly one nn.ModuleList", "none"),
    ),
    "a stage that says one side": Broken(
        "lumen",
        {'"norm": (["hidden_states"], ["hidden_states"])': '"norm": ["hidden_states"]'},
        says=("LumenConfig.base_model_pp_plan['norm']", "pair of lists"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a3_a_broken_rule_is_named_before_weights_are_read(rule: str, code: Callable[..., Path]) -> None:
    broken = RULES[rule]
    folder = code(broken.name, broken.changes, broken.config)
    with pytest.raises(ModelbayError) as caught:
        build_model(resolve(str(folder), trust_remote_code=True, dtype="float32"))
    message = str(caught.value)
    assert not isinstance(caught.value, WeightsError)
    assert "\n" not in message
    for part in broken.says:
        assert part in message


@pytest.mark.parametrize("name", ["lumen", "quill", "hive", "grove"])
def test_the_folders_are_refused_for_what_was_changed_alone(name: str, code: Callable[..., Path]) -> None:
    """A test of these tests: unchanged, each builds."""
    build_model(resolve(str(code(name)), trust_remote_code=True, dtype="float32"))


def test_a_pattern_that_matches_nothing_is_shown(code: Callable[..., Path]) -> None:
    """X5: patterns match whole names and * one level, so that a prefix or a shortened name shards nothing (case 35)."""
    changes = {'"layers.*.mlp.up_proj"': '"model.layers.*.mlp.up_proj"', '"layers.*.self_attn.gate"': '"layers.*.gate"'}
    resolution = resolve(str(code("lumen", changes)), trust_remote_code=True)
    build_model(resolution)
    [shown] = [decision for decision in resolution.trace.warnings() if decision.question == "base_model_tp_plan"]
    assert shown.answer == "8 patterns; match nothing: layers.*.gate, model.layers.*.mlp.up_proj"


def test_without_a_plan_there_is_nothing_to_check(code: Callable[..., Path]) -> None:
    changes = {"base_model_tp_plan": "tp_plan_for_later", "base_model_pp_plan": "pp_plan_for_later"}
    resolution = resolve(str(code("lumen", changes)), trust_remote_code=True)
    build_model(resolution)
    assert resolution.trace.find("base_model_tp_plan") is None


def test_a_config_class_that_refuses_is_one_line(code: Callable[..., Path]) -> None:
    folder = code("grove", config={"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    with pytest.raises(ConfigError, match="GroveConfig refuses the config: rope_scaling must have exactly"):
        resolve(str(folder), trust_remote_code=True)


def test_encoder_decoder_models_are_refused(code: Callable[..., Path]) -> None:
    folder = code("lumen", config={"is_encoder_decoder": True})
    with pytest.raises(ArchitectureError, match="encoder-decoder models are not served"):
        resolve(str(folder), trust_remote_code=True)


def test_an_absent_plugin_leaves_custom_models_to_nobody(code: Callable[..., Path]) -> None:
    with pytest.raises(ArchitectureError) as caught:
        resolve(str(code("lumen")), trust_remote_code=True, plugins=["runtime", "transformers"])
    assert re.search(
        r"transformers: Transformers has no model_type lumen.*auto_map \(modelbay-auto-map\)", str(caught.value)
    )
