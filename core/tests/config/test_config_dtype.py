"""C8 on models of several backbones: one dtype for all, or each its own."""

from __future__ import annotations

from typing import Any

import pytest

from modelbay.errors import ConfigError


@pytest.fixture
def llava(llama: dict[str, Any]) -> dict[str, Any]:
    """Text in bfloat16, vision in float16, the whole in float32."""
    return {
        "model_type": "llava",
        "architectures": ["X"],
        "dtype": "float32",
        "text_config": llama | {"dtype": "bfloat16"},
        "vision_config": {"model_type": "clip_vision_model", "torch_dtype": "float16"},
    }


def test_c8_auto_is_one_dtype_for_the_whole_model_and_traced(load: Any, llava: dict[str, Any]) -> None:
    """Case 21."""
    config, trace = load(llava)
    assert config.dtype == config.dtype_of("text_config") == config.dtype_of("vision_config") == "float32"
    assert config.backbone_dtypes == {}
    for name, own in (("text_config", "bfloat16"), ("vision_config", "float16")):
        [warning] = [one for one in trace.warnings() if one.question == f"dtype of {name}"]
        assert warning.answer == "float32"
        assert f"{name} says {own}" in warning.source
        assert "dtype=backbone keeps" in warning.source


def test_c8_an_argument_is_one_dtype_for_the_whole_model(load: Any, llava: dict[str, Any]) -> None:
    config, _ = load(llava, dtype="float16")
    assert config.dtype == config.dtype_of("text_config") == config.dtype_of("vision_config") == "float16"


def test_c8_backbone_keeps_each_ones_own(load: Any, llava: dict[str, Any]) -> None:
    config, trace = load(llava, dtype="backbone")
    assert config.dtype == "bfloat16", "the text model's own"
    assert config.sources["dtype"] == "config.json (text_config.dtype), by dtype=backbone"
    assert config.dtype_of("text_config") == "bfloat16"
    assert config.dtype_of("vision_config") == "float16"
    assert config.dtype_of("vision_config", "inner") == "float16", "what a backbone holds is part of it"
    assert config.dtype_of("projector") == config.dtype_of() == "float32", "what says none has that of the whole"
    assert trace.find("backbone dtypes").answer == {
        "": "float32",
        "text_config": "bfloat16",
        "vision_config": "float16",
    }
    assert not trace.warnings()


def test_c8_backbone_where_the_text_config_says_none(load: Any, llava: dict[str, Any], llama: dict[str, Any]) -> None:
    config, _ = load(llava | {"text_config": llama | {"dtype": None}}, dtype="backbone")
    assert (config.dtype, config.dtype_of("text_config")) == ("float32", "float32")
    assert config.dtype_of("vision_config") == "float16"


def test_c8_backbone_below_a_backbone(load: Any, llava: dict[str, Any], llama: dict[str, Any]) -> None:
    thinker = {key: llava[key] for key in ("text_config", "vision_config")} | {"model_type": "llava", "dtype": None}
    outer = {"model_type": "llava", "architectures": ["X"], "dtype": "float32", "thinker_config": thinker}
    config, _ = load(outer, dtype="backbone", hf_overrides={"thinker_config": {"vision_config": {"dtype": "float32"}}})
    assert config.text_path == ("thinker_config", "text_config")
    assert config.dtype == config.dtype_of("thinker_config", "text_config") == "bfloat16"
    assert config.dtype_of("thinker_config", "vision_config") == "float32"


@pytest.mark.parametrize("change", [{}, {"dtype": "float16"}, {"dtype": None}])
def test_c8_backbone_on_a_text_model_is_auto(load: Any, llama: dict[str, Any], change: dict[str, Any]) -> None:
    auto, kept = (load(llama | change, dtype=dtype)[0] for dtype in ("auto", "backbone"))
    assert kept.dtype == auto.dtype
    assert kept.sources["dtype"] == auto.sources["dtype"]
    assert kept.backbone_dtypes == {}


def test_c8_a_backbone_in_a_dtype_that_does_not_run(load: Any, llava: dict[str, Any]) -> None:
    wide = llava | {"vision_config": {"model_type": "clip_vision_model", "dtype": "float64"}}
    assert load(wide, dtype="backbone")[0].dtype_of("vision_config") == "float32"
    odd = llava | {"vision_config": {"model_type": "clip_vision_model", "dtype": "int4"}}
    with pytest.raises(ConfigError, match=r"the config's vision_config\.dtype is 'int4', which is not a dtype"):
        load(odd, dtype="backbone")
