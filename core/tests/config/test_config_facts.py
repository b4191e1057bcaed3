"""C3-C11: the facts, each checked against what Transformers' own config says or against the rule."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from modelbay.errors import ConfigError, UsageError, WeightsError
from modelbay.specs import ArchSpec

SAMPLE = [
    "apertus",
    "arcee",
    "bert",
    "bloom",
    "cohere",
    "cohere2",
    "deepseek_v3",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "helium",
    "llama",
    "llama4_text",
    "minimax",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "nemotron",
    "olmo2",
    "olmo3",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
]
SHORT = {"full_attention": "full", "sliding_attention": "sliding"}


def reference(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](architectures=["X"])


@pytest.mark.parametrize("kind", ["full json", "class defaults alone"])
@pytest.mark.parametrize("model_type", SAMPLE)
def test_facts_equal_transformers(load, model_type: str, kind: str) -> None:
    hf = reference(model_type)
    written = json.loads(hf.to_json_string(use_diff=False))
    config, _ = load(written if kind == "full json" else {"model_type": model_type, "architectures": ["X"]})
    assert config.vocab_size == hf.vocab_size
    assert config.hidden_size == hf.hidden_size
    assert config.num_layers == hf.num_hidden_layers
    assert config.num_heads == hf.num_attention_heads
    assert config.tie_word_embeddings == getattr(hf, "tie_word_embeddings", False)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    assert config.head_size == head_dim
    if not getattr(hf, "multi_query", False):
        assert config.num_kv_heads == (getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads)
    else:
        assert config.num_kv_heads == 1
    if getattr(hf, "layer_types", None):
        assert config.layer_types == tuple(SHORT.get(kind, kind) for kind in hf.layer_types)
    check_rope(config, hf)


def check_rope(config: Any, hf: Any) -> None:
    parameters = getattr(hf, "rope_parameters", None) or {}
    assert bool(parameters) == bool(config.rope)
    for kind, values in parameters.items() if "rope_type" not in parameters else [("default", parameters)]:
        spec = config.rope[SHORT.get(kind, kind)]
        assert spec.type == values["rope_type"]
        assert spec.theta == values["rope_theta"]
        assert spec.rotary_dim == int(config.head_size * values.get("partial_rotary_factor", 1.0))


def test_every_fact_has_a_source_and_a_decision(load, llama) -> None:
    config, trace = load(llama)
    for fact in (
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "rope",
        "max_model_len",
        "dtype",
        "layer_types",
    ):
        assert config.sources[fact]
        assert trace.find(fact, "config") is not None
    json.dumps(trace.to_list())
    assert config.sources["hidden_size"] == "config.json (hidden_size)"
    assert config.sources["head_size"].startswith("derived")


def test_config_pickles(load, llama) -> None:
    config, _ = load(llama)
    again = pickle.loads(pickle.dumps(config))
    assert again.rope == config.rope
    assert again.get("hidden_act") == "silu"


def test_get_reads_json_then_class_then_default(load, llama) -> None:
    config, _ = load(llama | {"rms_norm_eps": 0.5, "nothing": None})
    assert config.get("rms_norm_eps") == 0.5
    assert config.get("hidden_act") == "silu"
    assert config.get("nothing", 3) == 3
    assert config.get("absent") is None


# -- C3


def test_c3_architectures_of_a_nested_config(load, llama) -> None:
    """Case 15."""
    outer = {"model_type": "llava", "architectures": None, "text_config": llama}
    config, _ = load(outer)
    assert config.architectures == ("LlamaForCausalLM",)
    assert config.sources["architectures"] == "config.json (text_config.architectures)"


@pytest.mark.parametrize("absent", [None, [], "missing"])
def test_c3_inferred_from_model_type_and_task(load, llama, absent) -> None:
    """Case 15."""
    llama["architectures"] = absent
    if absent == "missing":
        del llama["architectures"]
    assert load(llama)[0].architectures == ("LlamaForCausalLM",)
    assert load(llama, runner="pooling")[0].architectures == ("LlamaModel",)


def test_c3_registered_architectures_come_first(load, plugin, llama) -> None:
    del llama["architectures"]
    arch = ArchSpec(name="OurLlama", target="x:y", model_types=("llama",))
    assert load(llama, [plugin("ours", register_architectures=[arch])])[0].architectures == ("OurLlama",)


def test_c3_error_says_what_is_missing(load, llama, tmp_path: Path) -> None:
    (tmp_path / "configuration_foo.py").write_text(
        "class FooConfig:\n    def __init__(self, **kw):\n        self.__dict__.update(kw)\n"
    )
    del llama["architectures"]
    llama |= {"model_type": "foo", "auto_map": {"AutoConfig": "configuration_foo.FooConfig"}}
    with pytest.raises(ConfigError, match=r"no architectures.*'foo'.*hf_overrides"):
        load(llama, trust_remote_code=True)


# -- C4


@pytest.mark.parametrize(
    "path", [("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config")]
)
def test_c4_text_config_at_any_depth(load, llama, path, tmp_path: Path) -> None:
    (tmp_path / "configuration_foo.py").write_text(
        "class FooConfig:\n    def __init__(self, **kw):\n        self.__dict__.update(kw)\n"
    )
    nested: dict[str, Any] = llama | {"dtype": None}
    for key in reversed(path):
        nested = {key: nested}
    outer = nested | {
        "model_type": "foo",
        "torch_dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_foo.FooConfig"},
    }
    config, _ = load(outer, trust_remote_code=True)
    assert config.text_path == path
    assert config.hidden_size == 64
    assert config.text.hidden_size == 64
    assert config.dtype == "bfloat16"
    assert config.sources["hidden_size"] == f"config.json ({'.'.join(path)}.hidden_size)"
    assert config.get("hidden_act") == "silu"  # the nested dict's own class knows


def test_c4_flat_json_that_the_class_nests(load) -> None:
    from transformers import Qwen2VLConfig

    flat = {
        "model_type": "qwen2_vl",
        "architectures": ["X"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
    }
    config, _ = load(flat)
    assert config.text is config.hf.text_config
    assert (config.hidden_size, config.vocab_size) == (64, 99)
    assert config.num_layers == Qwen2VLConfig().text_config.num_hidden_layers


def test_c4_class_default_beats_derivation(load) -> None:
    config, _ = load({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]})
    assert config.head_size == 256
    assert config.hidden_size // config.num_heads == 288
    assert config.sources["head_size"] == "class default"


# -- C6


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim", "expected"), [(5120, 64, 128, 128), (1792, 24, 128, 128), (64, 4, None, 16)]
)
@pytest.mark.parametrize("plugins", [[], ["llama"]])
def test_c6_head_size(load, llama, hidden, heads, head_dim, expected, plugins) -> None:
    """Case 19."""
    values = llama | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "model_type": "mistral",
    }
    assert load(values, plugins)[0].head_size == expected


def test_c6_head_size_that_does_not_divide(load, llama) -> None:
    with pytest.raises(ConfigError, match=r"no head_dim.*1792.*24"):
        load(llama | {"hidden_size": 1792, "num_attention_heads": 24, "model_type": "mistral"}, ["llama"])


@pytest.mark.parametrize("plugins", [[], ["llama"]])
def test_c6_null_kv_heads_mean_as_many_as_heads(load, llama, plugins) -> None:
    for model_type in ("llama", "mistral"):
        assert load(llama | {"num_key_value_heads": None, "model_type": model_type}, plugins)[0].num_kv_heads == 4


@pytest.mark.parametrize("name", ["num_kv_heads", "n_head_kv", "multi_query_group_num"])
def test_c6_kv_heads_under_other_names(load, llama, name) -> None:
    llama[name] = llama.pop("num_key_value_heads")
    assert load(llama, ["llama"])[0].num_kv_heads == 2


def test_c6_heads_that_differ_from_layer_to_layer(load) -> None:
    """Gemma 4: full layers have larger heads. The fact is the largest, and says so."""
    config = {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 256, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    found, _ = load(config)
    assert found.head_size == 32
    assert "head_dim" in found.per_layer
    assert "differs from layer to layer" in found.sources["head_size"]


def test_c6_kv_heads_that_do_not_divide(load, llama) -> None:
    with pytest.raises(ConfigError, match="4 attention heads cannot share 3 KV heads"):
        load(llama | {"num_key_value_heads": 3}, ["llama"])


def test_c6_experts_under_their_names(load) -> None:
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

    for model_type, expected in (
        ("mixtral", MixtralConfig().num_local_experts),
        ("qwen3_moe", Qwen3MoeConfig().num_experts),
        ("deepseek_v3", DeepseekV3Config().n_routed_experts),
        ("llama", None),
    ):
        assert load({"model_type": model_type, "architectures": ["X"]})[0].num_experts == expected


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_missing_sizes_are_named(load, llama, plugin, key, tmp_path: Path) -> None:
    (tmp_path / "configuration_foo.py").write_text(
        "class FooConfig:\n    def __init__(self, **kw):\n        self.__dict__.update(kw)\n"
    )
    del llama[key]
    llama |= {"model_type": "foo", "auto_map": {"AutoConfig": "configuration_foo.FooConfig"}}
    with pytest.raises(ConfigError, match=f"no {key}"):
        load(llama, trust_remote_code=True)


# -- C7


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 512),
        ({"model_max_length": 256}, 256),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 2048),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}}, 512),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            512,
        ),
        (
            {
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
                "original_max_position_embeddings": 128,
            },
            512,
        ),
    ],
)
def test_c7_rope_factor_only_for_types_whose_length_is_the_original(load, llama, change, expected) -> None:
    """Case 17."""
    assert load(llama | change, ["llama"])[0].max_model_len == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(1e30, 512), (1000000000000000019884624838656, 512), (256, 256), (None, 512), (8192, 512)]
)
def test_c7_tokenizer_limit(load, llama, limit, expected) -> None:
    """Case 17."""
    config, _ = load(llama, files={"tokenizer_config.json": {"model_max_length": limit}})
    assert config.max_model_len == expected


def test_c7_explicit_length(load, llama, monkeypatch) -> None:
    assert load(llama, max_model_len=100)[0].max_model_len == 100
    with pytest.raises(UsageError, match=r"max_model_len 513 is more than the model's 512.*MODELBAY_ALLOW_LONG"):
        load(llama, max_model_len=513)
    monkeypatch.setenv("MODELBAY_ALLOW_LONG_MAX_MODEL_LEN", "1")
    config, trace = load(llama, max_model_len=513)
    assert config.max_model_len == 513
    assert trace.warnings()


def test_c7_explicit_length_may_exceed_the_tokenizers_limit_and_use_what_yarn_gives(load, llama) -> None:
    assert (
        load(llama, files={"tokenizer_config.json": {"model_max_length": 64}}, max_model_len=512)[0].max_model_len
        == 512
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert load(llama | {"rope_parameters": yarn}, max_model_len=2048)[0].max_model_len == 2048


def test_c7_no_length_at_all_is_a_warning(load) -> None:
    """Case 17."""
    config, trace = load({"model_type": "bloom", "architectures": ["BloomForCausalLM"]})
    assert config.max_model_len == 2048
    assert any(decision.question == "maximum length" for decision in trace.warnings())


# -- C8


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "half"}, "float16"),
        ({"dtype": None}, "float32"),
        ({"dtype": "float64"}, "float32"),
    ],
)
def test_c8_auto_from_config(load, llama, change, expected) -> None:
    """Case 21."""
    assert load(llama | change)[0].dtype == expected


def test_c8_text_config_when_the_outer_says_nothing(load, llama) -> None:
    outer = {
        "model_type": "llava",
        "architectures": ["X"],
        "torch_dtype": None,
        "text_config": llama | {"dtype": "bfloat16"},
    }
    assert load(outer)[0].dtype == "bfloat16"


def test_c8_differing_backbone_is_traced(load, llama) -> None:
    """Case 21."""
    outer = {"model_type": "llava", "architectures": ["X"], "dtype": "bfloat16", "text_config": llama}
    config, trace = load(outer)
    assert config.dtype == "bfloat16"
    assert any(decision.question == "dtype of text_config" for decision in trace.warnings())


def test_c8_safetensors_header_when_the_config_says_nothing(load, llama, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    big = torch.zeros(64, 64, dtype=torch.float16)
    save_file({"a": big, "b": torch.zeros(2), "c": torch.zeros(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    config, _ = load(llama | {"dtype": None})
    assert (config.dtype, config.sources["dtype"]) == ("float16", "header of model.safetensors")


def test_c8_header_of_a_file_on_the_hub_without_downloading_it(hub, llama) -> None:
    import torch
    from safetensors.torch import save

    from modelbay.args import EngineArgs
    from modelbay.config import load_config
    from modelbay.plugins import load_plugins
    from modelbay.source import find_files
    from modelbay.trace import Trace

    weights = save({"a": torch.zeros(4, 4, dtype=torch.bfloat16)})
    hub.repo("org/name").commit({"config.json": json.dumps(llama | {"dtype": None}), "model.safetensors": weights})
    trace = Trace()
    files = find_files("org/name", trace=trace)
    args = EngineArgs(model="org/name", device="cpu")
    assert load_config(files, load_plugins(["llama"]), args, trace).dtype == "bfloat16"
    assert not (files.root / "model.safetensors").exists()


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x10" + b"\0" * 7 + b"{"])
def test_c8_broken_header_names_the_file(load, llama, tmp_path: Path, content) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(llama | {"dtype": None})


def test_c8_argument_wins_and_is_checked(load, llama) -> None:
    config, _ = load(llama, dtype="bf16")
    assert (config.dtype, config.checkpoint_dtype) == ("bfloat16", "float32")
    with pytest.raises(UsageError, match="dtype must be"):
        load(llama, dtype="float8")


def test_c8_float32_becomes_bfloat16_only_where_the_device_prefers_it(llama, tmp_path: Path) -> None:
    from modelbay.config.dtype import resolve_dtype
    from modelbay.config.origins import Origins
    from modelbay.source import find_files
    from modelbay.trace import Trace

    (tmp_path / "config.json").write_text(json.dumps(llama))
    trace = Trace()
    files = find_files(str(tmp_path), trace=trace)
    assert resolve_dtype("auto", "cpu", llama, (), Origins(), files, trace).run == "float32"
    assert resolve_dtype("auto", "cuda:0", llama, (), Origins(), files, trace).run == "bfloat16"
    assert trace.find("float32 checkpoint").answer == "bfloat16"
    assert resolve_dtype("auto", "cuda", llama | {"dtype": "float16"}, (), Origins(), files, trace).run == "float16"


# -- C9


@pytest.mark.parametrize("plugins", [[], ["qwen2"]])
@pytest.mark.parametrize(
    ("change", "kinds", "window"),
    [
        ({}, "ffff", None),
        ({"use_sliding_window": True, "max_window_layers": 2}, "ffss", 64),
        ({"use_sliding_window": False, "max_window_layers": 2}, "ffff", None),
        ({"use_sliding_window": True, "max_window_layers": 4}, "ffff", None),
    ],
)
def test_c9_qwen2_windows_mean_what_transformers_means(load, llama, change, kinds, window, plugins) -> None:
    from transformers import Qwen2Config

    values = llama | {"model_type": "qwen2", "sliding_window": 64} | change
    config, _ = load(values, plugins)
    assert config.layer_types == tuple({"f": "full", "s": "sliding"}[kind] for kind in kinds)
    assert config.sliding_window == window
    assert config.layer_types == tuple(SHORT[kind] for kind in Qwen2Config(**values).layer_types)


@pytest.mark.parametrize("plugins", [[], ["llama"]])
@pytest.mark.parametrize(
    ("change", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)]
)
def test_c9_mistral_window_and_its_explicit_null(load, llama, change, window, plugins) -> None:
    config, _ = load(llama | {"model_type": "mistral"} | change, plugins)
    assert config.sliding_window == window
    assert config.layer_types == (("sliding" if window else "full"),) * 4


def test_c9_surplus_layer_types_are_trimmed_with_a_warning(load, llama) -> None:
    types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    config, trace = load(llama | {"layer_types": types, "sliding_window": 8}, ["llama"])
    assert config.layer_types == ("full", "sliding", "full", "sliding")
    assert any(decision.question == "surplus layer_types" for decision in trace.warnings())
    with pytest.raises(ConfigError, match="3 entries for 4 layers"):
        load(llama | {"layer_types": types[:3], "sliding_window": 8}, ["llama"])


def test_c9_unknown_kinds_keep_their_name(load) -> None:
    config, _ = load({"model_type": "llama4_text", "architectures": ["X"]})
    assert set(config.layer_types) == {"chunked_attention", "full"}


# -- C10


def test_c10_default_sampling_and_stop_ids(load, llama, tmp_path: Path) -> None:
    """Case 22."""
    generation = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "eos_token_id": [1, 106],
        "unrelated": 3,
    }
    files = {"generation_config.json": generation}
    config, _ = load(llama | {"eos_token_id": 7}, files=files)
    assert config.generation == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 5}
    assert config.eos_token_ids == (7, 1, 106)
    ignored, _ = load(llama | {"eos_token_id": 7}, files=files, generation_config="modelbay")
    assert ignored.generation == {}
    assert ignored.eos_token_ids == (7, 1, 106)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 3, "do_sample": false, "temperature": 0.5}')
    replaced, _ = load(llama, files=files, generation_config=str(other))
    assert replaced.generation == {"top_k": 3, "temperature": 0.0}
    with pytest.raises(UsageError, match=r"no generation_config\.json"):
        load(llama, generation_config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": None, "top_k": 5}, {"top_k": 5, "temperature": 0.0}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": "hot"}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
        ({"do_sample": None, "top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 5}, {"top_k": 5}),
    ],
)
def test_c10_do_sample_false_is_greedy_and_absent_decides_nothing(
    load, llama, values: dict[str, Any], sampling: dict[str, Any]
) -> None:
    config, trace = load(llama, files={"generation_config.json": values})
    assert config.generation == sampling
    assert ("do_sample is false" in trace.find("default sampling").source) == (values.get("do_sample") is False)


def _generation_warning(trace: Any) -> dict[str, Any]:
    found = [one for one in trace.warnings() if one.question == "generation settings without effect"]
    return found[0].answer if found else {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("no_repeat_ngram_size", 3),
        ("bad_words_ids", [[5, 6]]),
        ("suppress_tokens", [1, 2]),
        ("begin_suppress_tokens", [220]),
        ("forced_bos_token_id", 0),
        ("forced_eos_token_id", [2]),
        ("forced_decoder_ids", [[1, 50259]]),
        ("sequence_bias", [[[5], -10.0]]),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("guidance_scale", 1.5),
        ("typical_p", 0.9),
        ("epsilon_cutoff", 3e-4),
        ("eta_cutoff", 3e-4),
        ("min_new_tokens", 4),
        ("stop_strings", ["END"]),
        ("encoder_repetition_penalty", 1.2),
    ],
)
def test_c10_what_would_change_the_output_and_does_not_is_named(load, llama, key: str, value: Any) -> None:
    _, trace = load(llama, files={"generation_config.json": {"temperature": 0.5, key: value}})
    assert _generation_warning(trace) == {key: value}
    _, trace = load(llama, files={"generation_config.json": {key: value}}, generation_config="modelbay")
    assert not _generation_warning(trace), "nothing of that file is asked for"


def test_c10_neutral_values_are_no_warning(load, llama) -> None:
    """Also everything that Transformers' own class has by default."""
    from transformers import GenerationConfig

    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "penalty_alpha": None, "bad_words_ids": []}
    defaults = json.loads(GenerationConfig().to_json_string(use_diff=False))
    for values in (neutral, defaults):
        _, trace = load(llama, files={"generation_config.json": values})
        assert not _generation_warning(trace)


def test_c10_a_long_value_is_counted(load, llama) -> None:
    _, trace = load(llama, files={"generation_config.json": {"suppress_tokens": list(range(90))}})
    assert _generation_warning(trace) == {"suppress_tokens": "90 entries"}


def test_c10_eos_of_outer_and_text_config_and_never_a_class_default(load, llama) -> None:
    assert load(llama)[0].eos_token_ids == ()
    outer = {
        "model_type": "llava",
        "architectures": ["X"],
        "eos_token_id": [4],
        "text_config": llama | {"eos_token_id": 5},
    }
    assert load(outer)[0].eos_token_ids == (5, 4)
    with pytest.raises(ConfigError, match="eos_token_id"):
        load(llama | {"eos_token_id": "x"}, ["llama"])


# -- C11, W5


def test_c11_quantization_is_kept_for_resolve(load, llama) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    assert load(llama | {"quantization_config": quantization})[0].quantization == quantization
    assert load(llama)[0].quantization is None
    assert load(llama | {"quantization_config": None})[0].quantization is None


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [(None, None, False), (True, None, True), (None, True, True), (True, False, False), (False, True, True)],
)
def test_w5_tie_flag_of_the_text_config_governs(load, llama, outer, inner, expected) -> None:
    """Case 20."""
    config = {"model_type": "llava", "architectures": ["X"], "text_config": llama}
    if outer is not None:
        config["tie_word_embeddings"] = outer
    if inner is not None:
        config["text_config"] = llama | {"tie_word_embeddings": inner}
    assert load(config)[0].tie_word_embeddings is expected
