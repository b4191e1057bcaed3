"""From config.json to `ModelConfig`: the frozen facts, each with its source (BEHAVIOUR C1-C11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelbay.rope import RopeSpec

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Core's frozen facts about a model. Sizes are counts; `get` reads everything a family needs beyond them.

    ``layer_types`` has one entry per layer: "full" or "sliding" (or a kind that a plugin registers).
    ``rope`` maps a layer type to its RopeSpec; the key "default" serves every type not named; empty: no RoPE.
    ``sources`` says for each fact: "config.json", "class default", "derived: …", "argument" …
    """

    model_type: str
    architectures: tuple[str, ...]
    raw: Mapping[str, Any]  # config.json after overrides
    hf: Any  # the config object: own class, Transformers', or trusted remote
    text: Any  # the text config object (hf itself if there is no nested one)
    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope: Mapping[str, RopeSpec]
    max_model_len: int
    dtype: str  # resolved: "float32", "bfloat16", "float16"
    checkpoint_dtype: str | None
    tie_word_embeddings: bool
    num_experts: int | None = None
    quantization: Mapping[str, Any] | None = None
    eos_token_ids: tuple[int, ...] = ()  # union of config and generation_config; the tokenizer's are added later
    generation: Mapping[str, Any] = field(default_factory=dict)  # default sampling, C10
    sources: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the text config: JSON, else class default, else ``default``; null is the same as absent."""
        raise NotImplementedError

    def rope_for(self, layer_type: str) -> RopeSpec | None:
        return self.rope.get(layer_type, self.rope.get("default"))


class PlainConfig:
    """A config class without torch or Transformers: class attributes are the defaults, keyword arguments win,
    None means absent. Families derive from it: ``class LlamaConfig(PlainConfig): model_type = "llama"; …``."""

    model_type = ""

    def __init__(self, **values: Any) -> None:
        raise NotImplementedError


def load_config(files: ModelFiles, plugins: Plugins, args: EngineArgs, trace: Trace) -> ModelConfig:
    """Walk C1-C11 and append every decision to ``trace``."""
    raise NotImplementedError
