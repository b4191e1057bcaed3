"""C6: KV heads of Falcon, whose flags mean something else than they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelbay.args import EngineArgs
from modelbay.config import load_config
from modelbay.plugins import load_plugins
from modelbay.source import find_files
from modelbay.trace import Trace


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 1),
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 8),
        ({"new_decoder_architecture": True, "num_kv_heads": 4}, 4),
        ({"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 2}, 2),
        ({"new_decoder_architecture": True, "multi_query": False}, 8),
    ],
)
def test_c6_kv_heads_of_falcon_are_those_of_its_attention(
    tmp_path: Path, values: dict[str, Any], expected: int
) -> None:
    from transformers import FalconConfig
    from transformers.models.falcon.modeling_falcon import FalconAttention

    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 1, "vocab_size": 32}
    raw = {"model_type": "falcon", "architectures": ["FalconForCausalLM"], **sizes, **values}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    args, trace = EngineArgs.create(str(tmp_path), device="cpu"), Trace()
    plugins = load_plugins(["transformers"], trace=trace)
    config = load_config(find_files(str(tmp_path), trace=trace), plugins, args, trace)
    assert config.num_kv_heads == expected
    for built in (FalconConfig(**sizes, **values), config.hf):  # the patch leaves the module as it was
        attention = FalconAttention(built, layer_idx=0)
        assert attention.num_kv_heads == expected
        assert attention.query_key_value.out_features == (8 + 2 * expected) * 8
