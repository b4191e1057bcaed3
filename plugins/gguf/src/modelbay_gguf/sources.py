"""Where in a GGUF file each key of the config that was made of it stands, for the trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelbay_gguf.archs import GgufArch
from modelbay_gguf.header import Header

#: Config key -> the metadata keys that may say it, without the architecture's prefix, beyond those translated by name.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "head_dim": ("attention.key_length", "rope.dimension_count"),
    "num_key_value_heads": ("attention.head_count_kv",),
    "sliding_window": ("attention.sliding_window",),
    "original_max_position_embeddings": ("rope.scaling.original_context_length",),
    "rope_type": ("rope.scaling.type",),
    "rope_theta": ("rope.freq_base",),
    "factor": ("rope.scaling.factor", "rope.scale_linear"),
    "beta_fast": ("rope.scaling.yarn_beta_fast",),
    "beta_slow": ("rope.scaling.yarn_beta_slow",),
    "attention_factor": ("rope.scaling.attn_factor",),
}
#: How the rest is known. Of llama3's and longrope's factors the file has only tensors.
_DERIVED: Mapping[str, str] = {
    "model_type": "from general.architecture",
    "architectures": "from general.architecture",
    "vocab_size": "rows of token_embd.weight",
    "head_dim": "embedding_length / attention.head_count",
    "num_key_value_heads": "as many as attention.head_count",
    "rope_type": "from rope.scaling and the factor tensors, none being default",
    "rope_theta": "what ggml takes where the file says none",
    "partial_rotary_factor": "rope.dimension_count / head size",
    "long_factor": "values of rope_factors_long.weight",
    "short_factor": "values of rope_factors_short.weight",
    "tie_word_embeddings": "whether output.weight is absent",
    "dtype": "types of the tensors",
    "quantization_config": "types of the tensors",
    "layer_types": "from attention.sliding_window_pattern, or the architecture's own pattern",
    "query_pre_attn_scalar": "from the sizes",
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def sources(
    header: Header,
    arch: GgufArch,
    facts: Mapping[str, Any],
    translated: Mapping[str, str],
    token_keys: Mapping[str, tuple[str, ...]],
    config: Mapping[str, Any],
) -> dict[str, str]:
    """Config key -> metadata key, or ``derived: …`` (`modelbay.specs.StoredConfig`).

    Args:
        facts: the metadata of the architecture without its prefix.
        translated: metadata keys (without prefix) -> the config key that each became.
        token_keys: config key -> the metadata keys of its token ids.
    """
    names = {name: key for key, name in translated.items()}
    found: dict[str, str] = {}
    for path, value in _leaves(config):
        if path[0] in token_keys:
            said = [key for key in token_keys[path[0]] if key in header.metadata]
            alone = len(said) == 1
            found[path[0]] = said[0] if alone else f"derived: {', '.join(said)}"
            continue
        keys = _candidates(path, names)
        key = next((key for key in keys if key in facts and facts[key] == value), None)
        found[".".join(path)] = f"derived: {_derived(path, config)}" if key is None else f"{arch.name}.{key}"
    return found


def _candidates(path: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    if path[-1] == "rope_theta" and "sliding_attention" in path:
        return ("rope.freq_base_swa",)
    own = (names[path[0]],) if len(path) == 1 and path[0] in names and path[0] not in ("vocab_size", "head_dim") else ()
    return (*own, *_KEYS.get(path[-1], ()))


def _derived(path: tuple[str, ...], config: Mapping[str, Any]) -> str:
    parameters = config.get("rope_parameters") or {}
    inner = parameters.get(path[1], {}) if len(path) == 3 else parameters
    if path[0] == "rope_parameters" and inner.get("rope_type") == "llama3" and path[-1] in _LLAMA3:
        return "llama3's, which rope_freqs.weight is made of"
    return _DERIVED.get(path[0]) or _DERIVED.get(path[-1]) or "from the tensors that there are"


def _leaves(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value; of RoPE each of its own, of other objects the object."""
    for key, value in config.items():
        if key != "rope_parameters":
            yield (key,), value
            continue
        for name, inner in value.items():
            if isinstance(inner, Mapping):
                yield from (((key, name, last), item) for last, item in inner.items())
            else:
                yield (key, name), inner
