"""C1, C2: where the config comes from, which overrides it takes, and which class it becomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelbay.config import PlainConfig
from modelbay.errors import ConfigError, NotAModelError, TrustError, UsageError
from modelbay.specs import ConfigClassSpec, ConfigPatch, LoadFormatSpec


class OwnLlama(PlainConfig):
    model_type = "llama"
    rope_theta = 5000.0
    own = True
    rms_norm_eps = 1e-3
    num_key_value_heads: int | None = 2


class OwnWithAliases(PlainConfig):
    model_type = "aliased"
    aliases = {"hidden_size": ("width",)}


def rename_width(config: dict[str, Any]) -> str | None:
    if "breadth" not in config:
        return None
    config["hidden_size"] = config.pop("breadth")
    return "breadth renamed to hidden_size"


def config_of_file(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


OWN = ConfigClassSpec(model_type="llama", target=f"{__name__}:OwnLlama")


def test_c2_own_class_comes_before_transformers(load, plugin, llama) -> None:
    """Case 5."""
    config, trace = load(llama, [plugin("own_llama", register_config_classes=[OWN])])
    assert config.hf.own is True
    assert config.rope["default"].theta == 5000.0
    assert trace.find("config class").source == "(in-process)"


def test_c2_own_type_never_runs_remote_code_even_when_trusted(load, plugin, llama, tmp_path: Path) -> None:
    """Case 7."""
    sentinel = tmp_path / "ran"
    (tmp_path / "configuration_x.py").write_text(f"open({str(sentinel)!r}, 'w')\nclass X: pass\n")
    llama["auto_map"] = {"AutoConfig": "configuration_x.X"}
    load(llama, [plugin("own_llama", register_config_classes=[OWN])], trust_remote_code=True)
    assert not sentinel.exists()


def test_c2_transformers_class_when_no_plugin_has_it(load, llama) -> None:
    from transformers import LlamaConfig

    config, trace = load(llama)
    assert type(config.hf) is LlamaConfig
    assert trace.find("config class").source.startswith("transformers ")


def test_c2_unknown_type_names_type_version_and_plugins(load, plugin, llama) -> None:
    import transformers

    with pytest.raises(ConfigError) as caught:
        load(llama | {"model_type": "foo"}, [plugin("own_llama", register_config_classes=[OWN])])
    message = str(caught.value)
    for part in ("'foo'", transformers.__version__, "(in-process)", "auto_map", "trust_remote_code would not help"):
        assert part in message
    assert "\n" not in message


def test_c2_unknown_type_with_auto_map_needs_trust_and_says_so(load, llama, tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    (tmp_path / "configuration_foo.py").write_text(f"open({str(sentinel)!r}, 'w')\nclass FooConfig: pass\n")
    with pytest.raises(TrustError) as caught:
        load(llama | {"model_type": "foo", "auto_map": {"AutoConfig": "configuration_foo.FooConfig"}})
    assert "trust" in str(caught.value)
    assert not sentinel.exists()


def test_c2_trusted_class_gets_the_raw_dict_after_overrides(load, llama, tmp_path: Path) -> None:
    code = "class FooConfig:\n    def __init__(self, **kw):\n        self.__dict__.update(kw); self.seen = dict(kw)\n"
    (tmp_path / "configuration_foo.py").write_text(code)
    llama |= {
        "model_type": "foo",
        "auto_map": {"AutoConfig": "configuration_foo.FooConfig"},
        "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
    }
    config, _ = load(llama, trust_remote_code=True, hf_overrides={"max_position_embeddings": 256})
    assert config.hf.seen["rope_scaling"]["type"] == "su"
    assert config.hf.seen["max_position_embeddings"] == 256
    assert config.rope["default"].type == "longrope"


def test_c2_missing_model_type_says_how_to_give_it(load, llama) -> None:
    del llama["model_type"]
    with pytest.raises(ConfigError, match=r"no model_type.*hf_overrides"):
        load(llama)
    assert load(llama, hf_overrides={"model_type": "llama"})[0].model_type == "llama"


def test_c2_refused_values_are_one_line_and_name_the_field(load, llama) -> None:
    with pytest.raises(ConfigError, match=r"LlamaConfig refuses the config.*hidden_size") as caught:
        load(llama | {"hidden_size": "wide"})
    assert "\n" not in str(caught.value)


def test_c1_own_classes_load_without_torch_and_transformers(tmp_path: Path, llama) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama))
    code = f"""
import sys
from modelbay.args import EngineArgs
from modelbay.config import load_config
from modelbay.plugins import load_plugins
from modelbay.source import find_files
from modelbay.trace import Trace
trace = Trace()
args = EngineArgs(model={str(tmp_path)!r})
config = load_config(find_files(args.model, trace=trace), load_plugins(["llama"]), args, trace)
assert config.hf.model_type == "llama"
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_c1_format_supplies_the_config_where_there_is_no_config_json(load, plugin, llama) -> None:
    spec = LoadFormatSpec(name="boxed", target="x:y", suffixes=(".box",), config=f"{__name__}:config_of_file")
    config, trace = load(None, [plugin("boxed", register_load_formats=[spec])], files={"model.box": llama})
    assert config.hidden_size == 64
    assert "boxed" in trace.find("config file").source


def test_c1_nothing_that_carries_a_config(load) -> None:
    with pytest.raises(NotAModelError):
        load(None, files={"README.md": "x"})


def test_c1_floats_that_json_cannot_hold(load) -> None:
    from transformers import Mamba2Config

    saved = json.loads(Mamba2Config().to_json_string(use_diff=False)) | {"architectures": ["Mamba2ForCausalLM"]}
    assert saved["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert load(saved)[0].hf.time_step_limit[1] == float("inf")


# -- overrides


def test_c1_overrides_come_before_the_class_is_chosen(load, llama) -> None:
    config, _ = load(llama | {"model_type": "foo"}, hf_overrides={"model_type": "mistral"})
    assert type(config.hf).__name__ == "MistralConfig"


def test_c1_nested_overrides_merge(load, llama) -> None:
    outer = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": llama}
    config, _ = load(outer, hf_overrides={"text_config": {"num_hidden_layers": 2}})
    assert (config.num_layers, config.hidden_size) == (2, 64)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ({"architecture": "X"}, "architectures"),
        ({"hiden_size": 3}, "hidden_size"),
        ({"rope_scaling": {"facto": 2}}, "factor"),
    ],
)
def test_c1_unknown_override_names_the_nearest(load, llama, override, near) -> None:
    """Case 15."""
    with pytest.raises(UsageError, match=f"Did you mean '{near}'"):
        load(llama, hf_overrides=override)


def test_c1_unknown_nested_override_names_its_path(load, llama) -> None:
    outer = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": llama}
    with pytest.raises(UsageError, match=r"text_config\.num_layer"):
        load(outer, hf_overrides={"text_config": {"num_layer": 2}})


def test_c1_override_beside_a_nested_text_config_is_refused(load, llama) -> None:
    outer = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": llama}
    with pytest.raises(UsageError, match=r'Use \{"text_config": \{"max_position_embeddings": …\}\}'):
        load(outer, hf_overrides={"max_position_embeddings": 128})


def test_c1_class_attributes_and_json_keys_are_known(load, llama) -> None:
    config, _ = load(llama | {"special": 1}, hf_overrides={"special": 2, "attention_bias": True})
    assert config.get("special") == 2
    assert config.get("attention_bias") is True


def test_overrides_leave_the_caller_dict_alone(load, llama) -> None:
    overrides = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    load(llama, hf_overrides=overrides)
    assert overrides == {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}


# -- patches and aliases


def test_patches_are_named_and_only_touch_their_types(load, plugin, llama) -> None:
    del llama["hidden_size"]
    llama["breadth"] = 32
    patches = [
        ConfigPatch(name="breadth", target=f"{__name__}:rename_width", model_types=("llama",)),
        ConfigPatch(name="not-this", target=f"{__name__}:missing", model_types=("qwen2",)),
    ]
    config, trace = load(llama, [plugin("patches", register_config_patches=patches)])
    assert config.hidden_size == 32
    assert trace.find("patch breadth").answer == "breadth renamed to hidden_size"


def test_c6_aliases_are_plugin_data(load, plugin, llama) -> None:
    llama |= {"model_type": "aliased", "width": 128, "groups": 1}
    del llama["hidden_size"], llama["num_key_value_heads"]
    spec = ConfigClassSpec(
        model_type="aliased", target=f"{__name__}:OwnWithAliases", aliases={"num_key_value_heads": ("groups",)}
    )
    config, _ = load(llama, [plugin("aliased", register_config_classes=[spec])])
    assert (config.hidden_size, config.num_kv_heads) == (128, 1)
    assert config.sources["hidden_size"] == "config.json (width)"


# -- PlainConfig


def test_plain_config_none_is_absent_except_where_null_is_a_value() -> None:
    config = OwnLlama(rms_norm_eps=None, rope_theta=7.0, extra=None, num_key_value_heads=None)
    assert (config.rms_norm_eps, config.rope_theta, config.extra) == (1e-3, 7.0, None)
    assert config.num_key_value_heads is None
