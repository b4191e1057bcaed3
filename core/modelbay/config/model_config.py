"""The frozen facts about a model that the rest of the hallway reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelbay.config.origins import Origins
from modelbay.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Core's frozen facts about a model. Sizes are counts; `get` reads everything a family needs beyond them.

    ``layer_types`` has one entry per layer: "full" or "sliding" (or a kind that a plugin registers).
    ``rope`` maps a layer type to its RopeSpec; the key "default" serves every type not named; empty: no RoPE.
    ``sources`` says for each fact: "config.json (key)", "argument hf_overrides (key)", "class default", "derived: …" …
    ``origins`` says the same for every value of ``raw``.
    ``raw`` is the checkpoint's config after overrides and historical patches; ``text_path`` the keys that lead from
    it to the text config (empty if there is no nested one). ``num_heads`` is 0 for a model without attention.
    ``per_layer``: config keys that differ from layer to layer; the fact is then the largest value.
    ``backbone_dtypes``: with ``dtype="backbone"`` the dtype of every sub-config that says one, by the dotted keys that
    lead to it, and under "" that of all which say none; else empty, and ``dtype`` serves everything. See `dtype_of`.
    """

    model_type: str
    architectures: tuple[str, ...]
    raw: Mapping[str, Any]
    hf: Any  # the config object: own class, Transformers', or trusted remote
    text: Any  # the text config object (hf itself if there is no nested one)
    text_path: tuple[str, ...] = ()
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
    origins: Origins = field(default_factory=Origins)
    per_layer: tuple[str, ...] = ()
    backbone_dtypes: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the text config: JSON, else class default, else ``default``; null is the same as absent."""
        value, read = self.text_raw.get(key), getattr(self.text, key, None)
        # Of one value the class has the form that it is computed with: a count that the JSON writes as 4.0.
        same = type(value) in (int, float) and type(read) in (bool, int, float) and value == read
        value = read if value is None or same else value
        return default if value is None else value

    @property
    def text_raw(self) -> Mapping[str, Any]:
        """The part of ``raw`` that describes the text model."""
        values: Mapping[str, Any] = self.raw
        for key in self.text_path:
            values = values.get(key) or {}
        return values

    def dtype_of(self, *path: str) -> str:
        """The dtype for what the sub-config under these keys describes: ``dtype_of("vision_config")``.

        ``dtype`` itself is that of the text model.
        """
        for depth in range(len(path), -1, -1):
            own = self.backbone_dtypes.get(".".join(path[:depth]))
            if own is not None:
                return own
        return self.dtype

    def rope_for(self, layer_type: str) -> RopeSpec | None:
        return self.rope.get(layer_type, self.rope.get("default"))
