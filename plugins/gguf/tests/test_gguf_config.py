"""Metadata to config: against the config of the model that was written, and against Transformers' own reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from modelbay.errors import ConfigError, WeightsError
from modelbay_gguf.archs import ARCHS
from modelbay_gguf.config import read_config

#: Where Transformers' reader of GGUF loses what the file or the architecture says, and we do not.
TRANSFORMERS_LOSES = {
    "qwen3": {"head_dim"},
    "gemma2": {"query_pre_attn_scalar"},
    "gemma3": {"query_pre_attn_scalar"},
    "stablelm": {"rope_parameters"},
}


def _as_config(values: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[values["model_type"]](**values)


def _close(found: Any, expected: Any) -> bool:
    """Equal; floats to the float32 that metadata holds."""
    if isinstance(found, float) and isinstance(expected, float):
        return np.float32(found) == np.float32(expected)
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_close(found[key], expected[key]) for key in found)
    return bool(found == expected)


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_c1_the_config_is_that_of_the_model_that_was_written(arch: str, write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf(arch)
    found, expected = _as_config(read_config(tiny.path)).to_dict(), tiny.model.config.to_dict()
    assert found.keys() == expected.keys()
    different = {key for key in found if not _close(found[key], expected[key])}
    assert different <= {"architectures", "pad_token_id", "dtype"}  # not said by the config that was written


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_c1_the_config_is_what_transformers_reads_or_better(arch: str, write_gguf: Callable[..., Any]) -> None:
    from transformers import AutoConfig

    tiny = write_gguf(arch, Q.Q8_0)
    found = _as_config(read_config(tiny.path)).to_dict()
    expected = AutoConfig.from_pretrained(tiny.path.parent, gguf_file=tiny.path.name).to_dict()
    ours = {"architectures", "quantization_config", "_name_or_path"}
    different = {key for key in found.keys() | expected.keys() if not _close(found.get(key), expected.get(key))}
    assert different - ours == TRANSFORMERS_LOSES.get(arch, set())


def test_c3_architecture_names_are_transformers_own() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    assert {arch.architecture for arch in ARCHS.values()} == {NAMES[arch.model_type] for arch in ARCHS.values()}


def test_c1_reading_the_config_reads_no_tensor(write_gguf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = write_gguf(kind=Q.Q8_0)

    def never(*args: object) -> None:
        raise AssertionError("dequantised")

    monkeypatch.setattr(gguf, "dequantize", never)
    monkeypatch.setattr(np, "fromfile", never)
    monkeypatch.setattr(torch, "frombuffer", never)
    assert read_config(tiny.path)["num_hidden_layers"] == 2


def test_w5_ties_and_dtype_and_quantisation_come_from_the_tensors(write_gguf: Callable[..., Any]) -> None:
    tied = read_config(write_gguf("qwen2", Q.Q4_1, name="a.gguf", tie_word_embeddings=True).path)
    assert tied["tie_word_embeddings"] is True
    assert tied["quantization_config"] == {"quant_method": "gguf", "tensors": {"Q4_1": 15}}
    assert "dtype" not in tied
    half = read_config(write_gguf("qwen2", Q.BF16, name="b.gguf").path)
    assert half["tie_word_embeddings"] is False
    assert "quantization_config" not in half
    assert half["dtype"] == "bfloat16"


def test_c10_every_token_that_ends_a_turn_stops(write_gguf: Callable[..., Any]) -> None:
    config = read_config(write_gguf(metadata=lambda writer: writer.add_eot_token_id(7)).path)
    assert config["eos_token_id"] == [2, 7]


def test_c6_the_embedding_says_how_large_the_vocabulary_is(write_gguf: Callable[..., Any]) -> None:
    """A tokenizer that knows fewer tokens than the model has rows is common (T3)."""
    tiny = write_gguf(vocab_size=160, vocabulary=False, metadata=lambda writer: writer.add_token_list(["a"] * 150))
    assert read_config(tiny.path)["vocab_size"] == 160


def _yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


def _linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def test_c5_scaled_rope_is_kept(write_gguf: Callable[..., Any]) -> None:
    yarn = read_config(write_gguf("qwen2", name="a.gguf", metadata=_yarn).path)["rope_parameters"]
    assert yarn == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    linear = read_config(write_gguf("llama", name="b.gguf", metadata=_linear).path)["rope_parameters"]
    assert linear == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0}


def test_c5_gemma3_scales_its_global_layers_alone(write_gguf: Callable[..., Any]) -> None:
    parameters = read_config(write_gguf("gemma3", metadata=_linear).path)["rope_parameters"]
    assert parameters == {
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama3_factors(model_config: Any) -> np.ndarray:
    """What divides the frequencies, by Transformers' own two formulas."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](model_config, torch.device("cpu"))[0]
    plain = 500000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    return (plain / scaled).numpy()


def test_c5_llama3_factors_become_parameters_again(write_gguf: Callable[..., Any]) -> None:
    from transformers import LlamaConfig

    model_config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=LLAMA3)
    factors = _llama3_factors(model_config)
    assert factors.min() == pytest.approx(1)
    assert len(set(factors.round(3).tolist())) > 2  # all three branches of the formula
    tiny = write_gguf(tensors={"rope_freqs.weight": factors}, rope_parameters=LLAMA3)
    assert read_config(tiny.path)["rope_parameters"] == LLAMA3


def test_c5_factors_that_are_not_llama3s_are_refused(write_gguf: Callable[..., Any]) -> None:
    """Dropping them would give wrong output without a word."""
    factors = np.linspace(1, 5, 8, dtype=np.float32)
    with pytest.raises(ConfigError, match=r"factors \(rope_freqs\.weight\) that are not llama3's"):
        read_config(write_gguf(tensors={"rope_freqs.weight": factors}).path)


def test_c5_longrope_factors_become_parameters(write_gguf: Callable[..., Any]) -> None:
    long, short = np.linspace(1, 8, 8, dtype=np.float32), np.linspace(1, 2, 8, dtype=np.float32)

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_attn_factors(1.25)

    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    config = _as_config(read_config(write_gguf("phi3", metadata=metadata, tensors=tensors).path))
    assert config.original_max_position_embeddings == 64
    expected = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
        "partial_rotary_factor": 1.0,
    }
    assert config.rope_parameters == expected
    with pytest.raises(ConfigError, match="longrope factors, but not all of"):
        read_config(write_gguf("phi3", name="half.gguf", tensors={"rope_factors_long.weight": long}).path)


@pytest.mark.parametrize(
    ("arch", "metadata", "said"),
    [
        ("llama", lambda writer: writer.add_expert_count(8), r"llama\.expert_count = 8"),
        ("llama", lambda writer: writer.add_logit_scale(0.5), r"llama\.logit_scale = 0\.5"),
        ("llama", lambda writer: writer.add_uint32("llama.new_invention", 3), r"llama\.new_invention = 3"),
        ("qwen2", lambda writer: writer.add_causal_attention(False), r"qwen2\.attention\.causal = False"),
        ("llama", lambda writer: writer.add_value_length(32), "value heads of 32"),
        ("qwen2", lambda writer: writer.add_key_length(32), "heads of 32"),
        ("llama", lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), None),
    ],
)
def test_a_key_that_would_change_the_output_is_refused_by_name(
    arch: str, metadata: Any, said: str | None, write_gguf: Callable[..., Any]
) -> None:
    tiny = write_gguf(arch, metadata=metadata)
    if said is None:
        assert read_config(tiny.path)["rope_parameters"]["rope_type"] == "yarn"
        return
    with pytest.raises(ConfigError, match=said):
        read_config(tiny.path)


def test_a1_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba'; supported: gemma2"):
        read_config(tmp_path / "m.gguf")


def test_c1_sizes_that_the_file_does_not_say_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"lacks the metadata keys llama\.context_length, llama\.block_count"):
        read_config(tmp_path / "m.gguf")


def test_w2_a_split_model_needs_all_its_shards_for_a_config(write_gguf: Callable[..., Any]) -> None:
    """Whether the head is tied stands in whichever shard holds output.weight."""
    tiny = write_gguf(name="m-00001-of-00002.gguf")
    with pytest.raises(WeightsError, match=r"absent: m-00002-of-00002\.gguf"):
        read_config(tiny.path)
    other = gguf.GGUFWriter(tiny.path.with_name("m-00002-of-00002.gguf"), "llama")
    other.add_tensor("more", gguf.quantize(np.zeros((2, 32), np.float32), Q.Q5_1), raw_dtype=Q.Q5_1)
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    assert read_config(tiny.path)["quantization_config"]["tensors"] == {"Q5_1": 1}
