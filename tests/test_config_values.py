"""Every key of a config with values of every wrong type: an error of ours in one line, or a success; nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from modelbay.args import EngineArgs
from modelbay.errors import ConfigError, ModelbayError
from modelbay.plugins import Plugins, load_plugins
from modelbay.resolve import Resolution, resolve_args
from modelbay_runtime.build import build_model
from modelbay_runtime.cli.plan import command

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
DECODER: dict[str, Any] = {
    **COMMON, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "num_key_value_heads": 2, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
LLAMA = {**DECODER, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 8, "mlp_bias": False}
QWEN3_MOE = {
    **DECODER, **EXPERTS, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8,
    "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK = {
    **DECODER, **EXPERTS, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1, "rope_interleave": True,
}  # fmt: skip
BERT = {**COMMON, "model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu", "type_vocab_size": 2}
LLAVA: dict[str, Any] = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 60,
    "text_config": {key: value for key, value in LLAMA.items() if key != "architectures"},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    },
}  # fmt: skip
CONFIGS = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK, "bert": BERT, "llava": LLAVA}
#: Keys that a config may have beside its own.
FURTHER = (
    "rope_parameters", "rope_scaling", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers",
    "quantization_config", "auto_map", "text_config", "multi_query", "is_encoder_decoder", "partial_rotary_factor",
)  # fmt: skip
WRONG: list[Any] = [True, 1.5, "x", [], ["x"], {"a": 1}, -1, math.nan, [[1]], 2**31, 0]
ROPES: list[Any] = [
    {"rope_type": ["x"]}, {"type": ["x"]}, {"rope_type": {}}, {"rope_type": 5}, {"full_attention": {"type": ["x"]}},
    {"rope_type": "yarn", "factor": ["x"]}, {"rope_type": "llama3", "factor": "x"}, {"rope_theta": ["x"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture
def resolved(tmp_path: Path, plugins: Plugins) -> Any:
    def resolve(config: Mapping[str, Any]) -> Resolution:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return resolve_args(EngineArgs.create(str(tmp_path), device="cpu"), plugins=plugins)

    return resolve


def mistaken(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in dict.fromkeys((*config, *FURTHER)):
        for value in WRONG + (ROPES if key.startswith("rope_") else []):
            yield {**config, key: value}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "bert"])
def test_c1_any_value_is_an_error_of_ours_or_a_success(name: str, resolved: Any) -> None:
    messages = []
    for config in mistaken(CONFIGS[name]):
        try:
            resolved(config)
        except ModelbayError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


FLAGS = {
    "llama": ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "multi_query"),
    "qwen3_moe": ("attention_bias", "norm_topk_prob", "tie_word_embeddings"),
    "deepseek_v3": ("attention_bias", "norm_topk_prob", "rope_interleave", "tie_word_embeddings"),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FLAGS.items() for key in keys])
@pytest.mark.parametrize("value", ["false", "true", [], 2])
def test_a_flag_is_no_text(name: str, key: str, value: Any, resolved: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        resolved({**CONFIGS[name], key: value})


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("llama", {"architectures": 5}, "architectures must be a list of names, got 5"),
        ("llama", {"architectures": [5]}, "architectures must be a list of names"),
        ("llama", {"rope_parameters": {"rope_type": ["x"]}}, r"rope_type must be a name, got \['x'\]"),
        ("llama", {"intermediate_size": [[1], [2]]}, "intermediate_size must be a whole number"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act must be text"),
        ("deepseek_v3", {"topk_group": 1.5}, "topk_group must be a whole number"),
        ("deepseek_v3", {"topk_method": ["noaux_tc"]}, "topk_method must be text"),
        ("deepseek_v3", {"routed_scaling_factor": "4"}, "routed_scaling_factor must be a number"),
        ("deepseek_v3", {"routed_scaling_factor": -1.0}, "routed_scaling_factor must be greater than 0"),
        ("deepseek_v3", {"moe_layer_freq": 0}, "moe_layer_freq must be greater than 0"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts must be a whole number"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive whole number"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and there are 4 experts"),
        ("llama", {"head_dim": 2**31}, "head_dim is 2,147,483,648; no model has more than 4,096"),
        ("llama", {"head_dim": None, "hidden_size": 2**20}, "head_dim is 524,288; no model"),
        ("llama", {"n_heads": 2**31}, "n_heads is 2,147,483,648; no model"),
        ("deepseek_v3", {"qk_rope_head_dim": 2**31}, "qk_rope_head_dim is 2,147,483,648; no model"),
        (
            "deepseek_v3",
            {"n_routed_experts": 2**31},
            "n_routed_experts is 2,147,483,648; no model has more than 16,384",
        ),
        (
            "deepseek_v3",
            {"num_hidden_layers": 2**31},
            "num_hidden_layers is 2,147,483,648; no model has more than 10,000",
        ),
        ("bert", {"num_labels": 2**31}, "num_labels is 2,147,483,648; no model"),
        (
            "llava",
            {"vision_config": {**LLAVA["vision_config"], "num_hidden_layers": 10**6}},
            "vision_config.num_hidden",
        ),
        ("llava", {"vision_config": {**LLAVA["vision_config"], "image_size": 2**31}}, "vision_config.image_size is"),
    ],
)
def test_what_is_refused_names_the_key(name: str, values: dict[str, Any], reason: str, resolved: Any) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolved({**CONFIGS[name], **values})


def test_a_count_that_is_written_as_a_float_is_computed_with_as_a_count(resolved: Any) -> None:
    written = {"n_group": 4.0, "topk_group": 2.0, "kv_lora_rank": 8.0, "num_hidden_layers": 2.0, "attention_bias": 1}
    found = resolved({**DEEPSEEK, **written})
    assert (found.config.get("topk_group"), type(found.config.get("topk_group"))) == (2, int)
    assert found.config.get("attention_bias") is True
    expected = {name: p.shape for name, p in build(resolved({**DEEPSEEK, "attention_bias": True})).items()}
    assert {name: p.shape for name, p in build(found).items()} == expected


def build(resolution: Resolution) -> dict[str, Any]:
    return dict(build_model(resolution).module.named_parameters())


@pytest.mark.parametrize(
    "config",
    [
        {**DEEPSEEK, "num_hidden_layers": 61, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1,
         "topk_group": 1},
        {**LLAMA, "num_hidden_layers": 126, "head_dim": 256},
    ],
    ids=["kimi", "llama"],
)  # fmt: skip
def test_sizes_that_models_have_are_built(config: dict[str, Any], resolved: Any) -> None:
    assert len({name.split(".")[2] for name in build(resolved(config)) if ".layers." in name}) in (61, 126)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("bert", {"num_hidden_layers": 2000}, "num_hidden_layers is 2,000, and Transformers' classes"),
        ("qwen3_moe", {"num_experts": 4000, "num_hidden_layers": 4000}, "num_hidden_layers is 4,000, and Transf"),
        ("qwen3_moe", {"num_experts": 4000, "num_hidden_layers": 400}, "num_experts is 4,000 in 400 layers"),
        ("llava", {"vision_config": {**LLAVA["vision_config"], "num_hidden_layers": 9000}}, "vision_config.num_hidden"),
        ("llava", {"vision_config": {**LLAVA["vision_config"], "patch_size": 0}}, "ZeroDivisionError"),
        ("bert", {"pad_token_id": 9999}, "Padding_idx must be within num_embeddings"),
        ("llama", {"max_position_embeddings": 99_999_999, "head_dim": 256}, "max_model_len"),
    ],
)
def test_plan_ends_in_one_line_and_says_nothing_else(
    name: str, values: dict[str, Any], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **values}))
    result = CliRunner().invoke(command, [str(tmp_path), "--device", "cpu"])
    assert isinstance(result.exception, ModelbayError), (result.output, result.exception)
    assert reason in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.output == ""
    assert capfd.readouterr() == ("", "")


def test_warnings_that_were_held_back_are_said_after_a_success() -> None:
    import logging
    import warnings

    from modelbay_runtime.cli.held import held_warnings

    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with pytest.warns(UserWarning, match="from Python"), held_warnings():  # noqa: PT031
            logger.warning("from the library")
            warnings.warn("from Python", stacklevel=1)
            assert seen == []
        assert seen == ["from the library"]
        with pytest.raises(ValueError, match="fails"), held_warnings():  # noqa: PT012
            logger.warning("never said")
            raise ValueError("it fails")
        assert seen == ["from the library"]
    finally:
        logger.removeHandler(handler)
