"""explain names the true source of every value: a file, an argument or a class that has what it is said to have.

The property: whatever keys a checkpoint has and whatever overrides replace, each source that is named holds the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from modelbay.config import ModelConfig, PlainConfig
from modelbay.rope import LAYER_KINDS
from modelbay.specs import ConfigClassSpec, ConfigPatch, LoadFormatSpec, StoredConfig

_NAMED = re.compile(r"(?P<holder>argument hf_overrides|[\w./-]+\.(?:json|toy)) \((?P<key>[\w.\[\]]+)\)")
_GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 256, "n_embd": 64, "n_layer": 4,
    "n_head": 4, "n_positions": 128,
}  # fmt: skip
_NEOX = {
    "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128, "rotary_pct": 0.5,
    "rotary_emb_base": 5000, "torch_dtype": "float16", "tie_word_embeddings": False,
}  # fmt: skip
_QWEN2 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "sliding_window": 32,
    "use_sliding_window": True, "max_window_layers": 2, "dtype": "torch.bfloat16", "eos_token_id": [3, 4],
}  # fmt: skip
_PHI3 = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}  # fmt: skip
_GEMMA3 = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "sliding_window": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
_FALCON = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True,
}  # fmt: skip
_NESTED_TEXT = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128, "rope_theta": 3e4, "dtype": "float16", "eos_token_id": 9,
}  # fmt: skip
_LLAVA = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": _NESTED_TEXT,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 4},
    "image_token_index": 5,
}  # fmt: skip
_LLAMA3 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
CHECKPOINTS: Mapping[str, dict[str, Any]] = {
    "gpt2": _GPT2, "gpt_neox": _NEOX, "qwen2": _QWEN2, "phi3": _PHI3, "gemma3": _GEMMA3, "falcon": _FALCON,
    "llava": _LLAVA, "llama3": _LLAMA3,
}  # fmt: skip
#: Overrides of the text config, each legal for every checkpoint above.
OVERRIDES: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 2},
    {"vocab_size": 128},
    {"hidden_size": 128},
    {"max_position_embeddings": 96},
    {"eos_token_id": 7},
    {"sliding_window": None},
    {"dtype": "float32"},
    {"rope_theta": 777.0},
    {"partial_rotary_factor": 0.25},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": None},
    {"tie_word_embeddings": True},
)


def _at(values: Any, dotted: str) -> Any:
    """The value under dotted keys, a unique object where there is none."""
    for key in dotted.split("."):
        if not isinstance(values, Mapping) or key not in values:
            return _NOTHING
        values = values[key]
    return values


_NOTHING = object()


def _normal(value: Any) -> Any:
    """A fact and what a file has for it in one spelling."""
    if isinstance(value, str):
        return LAYER_KINDS.get(value, value.removeprefix("torch."))
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _parts(config: ModelConfig) -> Iterator[tuple[str, Any, str]]:
    """Every fact, its value and its source; of RoPE every value of it."""
    for fact, source in config.sources.items():
        if fact != "rope" or not config.rope:
            yield fact, getattr(config, fact), source
            continue
        by_name: dict[str, str] = {}
        for part in re.split(r"; (?=[\w.]+(?:, [\w.]+)*: )", source):
            names, separator, where = part.partition(": ")
            by_name |= dict.fromkeys(names.split(", "), where) if separator and " " not in names.split(", ")[0] else {}
        for kind, spec in config.rope.items():
            for name, value in (("type", spec.type), ("theta", spec.theta), *spec.parameters.items()):
                qualified = name if kind == "default" else f"{kind}.{name}"
                if by_name and "derived" not in by_name:
                    yield f"rope {qualified}", value, by_name[qualified]


def check_sources(config: ModelConfig, holders: Mapping[str, Any], kwargs: Mapping[str, Any]) -> int:
    """Raise for a fact whose source does not hold it; how many sources were named."""
    holders = {**holders, "argument hf_overrides": kwargs.get("hf_overrides") or {}}
    count = 0
    for fact, value, source in _parts(config):
        named = [(match["holder"], match["key"]) for match in _NAMED.finditer(source)]
        for holder, key in named:
            assert holder in holders, f"{fact}: {source}: there is no {holder}"
            assert _at(holders[holder], key) is not _NOTHING, f"{fact}: {source}: {holder} has no {key}"
        count += len(named)
        alone = len(named) == 1 and source == f"{named[0][0]} ({named[0][1]})"
        if alone:
            said = _at(holders[named[0][0]], named[0][1])
            if fact == "eos_token_ids" and not isinstance(said, list):
                said = [said]
            if isinstance(said, list) and fact == "layer_types":
                said = said[: config.num_layers]
            assert _normal(said) == _normal(value), f"{fact} is {value!r}, and {source} has {said!r}"
        elif not named:
            assert source.startswith(("derived: ", "class default")) or source.split("=")[0] in [
                f"argument {name}" for name in kwargs
            ], f"{fact}: {source}"
    return count


def _nested(checkpoint: str, override: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": override} if checkpoint == "llava" else override


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_source_holds_its_value_without_overrides(name: str, load: Callable[..., Any]) -> None:
    config, _ = load(CHECKPOINTS[name])
    assert check_sources(config, {"config.json": CHECKPOINTS[name]}, {}) >= 4


#: What the class of a checkpoint, or its layers, cannot have.
REFUSED = {("phi3", key) for key in ("hidden_size", "partial_rotary_factor", "rope_scaling", "rope_parameters")} | {
    ("gemma3", "sliding_window")
}


@pytest.mark.parametrize(
    ("name", "override"),
    [
        pytest.param(name, override, id=f"{name}-{next(iter(override))}")
        for name in CHECKPOINTS
        for override in OVERRIDES
        if (name, next(iter(override))) not in REFUSED
    ],
)
def test_every_source_holds_its_value_with_an_override(
    name: str, override: dict[str, Any], load: Callable[..., Any]
) -> None:
    kwargs = {"hf_overrides": _nested(name, override)}
    config, trace = load(CHECKPOINTS[name], **kwargs)
    check_sources(config, {"config.json": CHECKPOINTS[name]}, kwargs)
    assert trace.find("overrides").source == "argument hf_overrides"


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_source_holds_its_value_with_any_overrides(data: st.DataObject, load: Callable[..., Any]) -> None:
    name = data.draw(st.sampled_from(sorted(CHECKPOINTS)))
    chosen = data.draw(st.lists(st.sampled_from(OVERRIDES), max_size=4))
    merged: dict[str, Any] = {}
    for override in chosen:
        merged |= override
    if merged.get("rope_scaling", 0) != merged.get("rope_parameters", 0) and {"rope_scaling", "rope_parameters"} <= set(
        merged
    ):
        del merged["rope_scaling"]
    kwargs = {"hf_overrides": _nested(name, merged)} if merged else {}
    assume(not any((name, key) in REFUSED for key in merged))
    config, _ = load(CHECKPOINTS[name], **kwargs)
    check_sources(config, {"config.json": CHECKPOINTS[name]}, kwargs)


def test_an_override_is_named_as_the_argument_with_its_key(llama: dict[str, Any], load: Callable[..., Any]) -> None:
    config, trace = load(llama, hf_overrides={"num_hidden_layers": 2, "architectures": ["LlamaModel"]})
    assert config.sources["num_layers"] == "argument hf_overrides (num_hidden_layers)"
    assert config.sources["architectures"] == "argument hf_overrides (architectures)"
    assert config.sources["hidden_size"] == "config.json (hidden_size)"
    assert trace.find("num_layers").source == config.sources["num_layers"]


@pytest.mark.parametrize(("written", "key"), [(_GPT2, "n_layer"), (_GPT2, "num_hidden_layers")])
def test_an_override_under_another_name_is_named_as_it_was_given(
    written: dict[str, Any], key: str, load: Callable[..., Any]
) -> None:
    """The file says ``n_layer``; the override is taken under the class's name and under its own."""
    config, _ = load(written, hf_overrides={key: 2})
    assert (config.num_layers, config.sources["num_layers"]) == (2, f"argument hf_overrides ({key})")


def test_a_nested_override_is_named_with_the_keys_that_lead_to_it(load: Callable[..., Any]) -> None:
    config, _ = load(_LLAVA, hf_overrides={"text_config": {"num_hidden_layers": 2, "rope_theta": 5.0}})
    assert config.sources["num_layers"] == "argument hf_overrides (text_config.num_hidden_layers)"
    assert "theta: argument hf_overrides (text_config.rope_theta)" in config.sources["rope"]
    assert config.sources["dtype"] == "config.json (text_config.dtype)"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"rope_theta": 5.0}, {"theta": "argument hf_overrides (rope_theta)"}),
        ({"rope_scaling": {"factor": 2.0}}, {"factor": "argument hf_overrides (rope_scaling.factor)"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"type": "argument hf_overrides (rope_scaling.type)", "theta": "config.json (rope_parameters.rope_theta)"},
        ),
        ({"rope_scaling": None}, {"type": "derived: null in argument hf_overrides (rope_scaling)"}),
        ({}, {"": "config.json (rope_parameters)"}),
    ],
)
def test_c5_each_value_of_rope_has_its_own_source(
    override: dict[str, Any], expected: dict[str, str], load: Callable[..., Any]
) -> None:
    config, _ = load(_LLAMA3, **({"hf_overrides": override} if override else {}))
    source = config.sources["rope"]
    for name, where in expected.items():
        assert where.split(" (")[0] in source
        if name:
            part = next(part for part in source.split("; ") if name in part.partition(": ")[0].split(", "))
            assert part.endswith(where), source


def test_what_nobody_says_is_a_class_default_or_derived(load: Callable[..., Any]) -> None:
    config, _ = load(_GPT2)
    assert config.sources["tie_word_embeddings"] == "class default"
    assert config.sources["dtype"].startswith("derived")
    assert config.sources["eos_token_ids"].startswith("derived")
    falcon, _ = load(_FALCON)
    assert falcon.sources["num_kv_heads"] == "derived: multi_query is true (config.json (multi_query))"


def test_c10_stop_tokens_name_only_the_files_that_have_them(llama: dict[str, Any], load: Callable[..., Any]) -> None:
    files = {"generation_config.json": {"eos_token_id": 5, "do_sample": False, "temperature": 0.6}}
    config, trace = load(llama, files=files)
    assert config.sources["eos_token_ids"] == "generation_config.json (eos_token_id)"
    assert "do_sample is false" in trace.find("default sampling").source
    both, _ = load(llama | {"eos_token_id": 4}, files=files)
    assert both.sources["eos_token_ids"] == "config.json (eos_token_id); generation_config.json (eos_token_id)"


def test_c10_stop_tokens_of_another_generation_config_name_its_path(
    llama: dict[str, Any], load: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("generation")
    (folder / "generation_config.json").write_text('{"eos_token_id": 6}')
    config, _ = load(llama, generation_config=str(folder))
    assert config.sources["eos_token_ids"] == f"{folder / 'generation_config.json'} (eos_token_id)"


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_c7_the_length_names_the_file_that_limits_it(
    name: str, llama: dict[str, Any], load: Callable[..., Any]
) -> None:
    config, _ = load(llama, files={name: {"max_seq_length": 64}})
    assert (config.max_model_len, config.sources["max_model_len"]) == (64, f"{name} (max_seq_length)")
    other, _ = load(llama, files={name: {}, "tokenizer_config.json": {"model_max_length": 48}})
    assert other.sources["max_model_len"] == "tokenizer_config.json (model_max_length)"
    asked, _ = load(llama, files={name: {}}, max_model_len=32)
    assert asked.sources["max_model_len"] == "argument max_model_len"


def test_c11_quantization_names_where_it_is_said(load: Callable[..., Any]) -> None:
    assert load(_LLAMA3)[0].sources["quantization"] == "config.json (quantization_config)"
    nested = {**_LLAVA, "text_config": {**_NESTED_TEXT, "quantization_config": {"quant_method": "fp8"}}}
    assert load(nested)[0].sources["quantization"] == "config.json (text_config.quantization_config)"
    mixed, _ = load(_LLAMA3, hf_overrides={"quantization_config": {"quant_method": "x"}})
    assert mixed.sources["quantization"] == (
        "config.json (quantization_config); argument hf_overrides (quantization_config.quant_method)"
    )


class Named(PlainConfig):
    """A family whose checkpoints have names of their own."""

    model_type = "named"
    vocab_size = 64
    hidden_size = 32
    num_attention_heads = 2
    aliases = {"num_hidden_layers": ("depth",)}


def test_a_plugins_aliases_name_the_key_that_is_there(load: Callable[..., Any], plugin: Callable[..., Any]) -> None:
    mine = plugin("named", register_config_classes=[ConfigClassSpec(model_type="named", target=f"{__name__}:Named")])
    written = {"model_type": "named", "architectures": ["X"], "depth": 3, "max_position_embeddings": 64}
    config, _ = load(written, [mine])
    assert config.sources["num_layers"] == "config.json (depth)"
    assert config.sources["hidden_size"] == "class default"
    config, _ = load(written, [mine], hf_overrides={"depth": 2})
    assert config.sources["num_layers"] == "argument hf_overrides (depth)"


def deepen(config: dict[str, Any]) -> str | None:
    config["num_hidden_layers"] = 3
    return "three layers"


def test_what_a_patch_changed_names_the_patch(
    llama: dict[str, Any], load: Callable[..., Any], plugin: Callable[..., Any]
) -> None:
    mine = plugin("patcher", register_config_patches=[ConfigPatch(name="deeper", target=f"{__name__}:deepen")])
    config, _ = load(llama, [mine])
    assert config.num_layers == 3
    assert config.sources["num_layers"].startswith("derived: patch deeper of ")


def read_toy(path: Path) -> StoredConfig:
    values = json.loads(path.read_text())
    sources = {"num_hidden_layers": "toy.depth", "rope_parameters": "toy.rope", "tie_word_embeddings": "derived: none"}
    return StoredConfig(values=values, sources=sources)


def read_plain_toy(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("reader", ["read_toy", "read_plain_toy"])
def test_a_load_format_that_carries_a_config_is_named_and_no_config_json(
    reader: str, llama: dict[str, Any], load: Callable[..., Any], plugin: Callable[..., Any]
) -> None:
    spec = LoadFormatSpec(name="toy", target="a:b", suffixes=(".toy",), config=f"{__name__}:{reader}")
    mine = plugin("toys", register_load_formats=[spec])
    values = {**llama, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "tie_word_embeddings": False}
    config, trace = load(None, [mine], files={"model.toy": values})
    assert not any(
        re.search(r"\bconfig\.json", decision.source.replace("no generation_config.json", "")) for decision in trace
    )
    by_reader = "derived: by load format 'toy', from model.toy"
    told = reader == "read_toy"
    assert config.sources["num_layers"] == ("model.toy (toy.depth)" if told else by_reader)
    assert config.sources["tie_word_embeddings"] == ("derived: none" if told else by_reader)
    assert config.sources["hidden_size"] == by_reader
    assert ("theta: model.toy (toy.rope)" in config.sources["rope"]) or not told
    replaced, _ = load(None, [mine], files={"model.toy": values}, hf_overrides={"num_hidden_layers": 2})
    assert replaced.sources["num_layers"] == "argument hf_overrides (num_hidden_layers)"
