"""GGUF metadata to what config.json would have said.

Keys that Transformers translates are taken from its table; what it leaves out (scaled RoPE, soft-caps, head sizes)
is added here. A key of the architecture that nobody translates is refused: it would change the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelbay.errors import ConfigError
from modelbay.specs import StoredConfig
from modelbay_gguf.archs import ARCHS, GgufArch, arch_named
from modelbay_gguf.files import local_shards
from modelbay_gguf.header import Header, StringArray, read_header
from modelbay_gguf.rope import rope_parameters
from modelbay_gguf.sources import sources

_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "unk_token_id": "tokenizer.ggml.unknown_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# All of these end a generation: end of text, of turn, of message.
_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

#: Keys that are used here or that say nothing about the forward pass.
_UNDERSTOOD = frozenset(
    (
        "vocab_size", "block_count", "context_length", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    )
)  # fmt: skip
#: Keys that are harmless with one value only: as anything else they would need code that is not there.
_ONLY_AS: Mapping[str, Any] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "tensor_data_layout": "Meta AI original pth",  # what the "llama" architecture has in any case
}


def read_config(path: Path | str) -> dict[str, Any]:
    """The values of `stored_config`."""
    return stored_config(path).values


def stored_config(path: Path | str) -> StoredConfig:
    """What config.json would have said about this model, from the header alone, and which metadata key said it.

    Args:
        path: the .gguf file; of a split model any shard, the others beside it.

    Raises:
        ConfigError: an architecture or a metadata key that is not supported, named.
        WeightsError: the file is damaged, or a shard is absent.
    """
    headers = [read_header(shard) for shard in local_shards(Path(path))]
    header = headers[0]
    arch = arch_named(header.metadata.get("general.architecture"), str(header.path))
    prefix = f"{arch.name}."
    facts = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    config = {"model_type": arch.model_type, "architectures": [arch.architecture]}
    config |= _translated(header, arch, facts)
    config |= _sizes(header, arch, facts, headers)
    config |= _FAMILY.get(arch.name, _nothing)(header, facts, config, headers)
    config |= _tokens(header)
    config |= _storage(headers)
    tokens = {name: (key,) for name, key in _TOKEN_IDS.items()} | {"eos_token_id": _END_TOKENS}
    return StoredConfig(values=config, sources=sources(header, arch, facts, _table(arch), tokens, config))


def _table(arch: GgufArch) -> dict[str, str]:
    """Metadata keys, without the architecture's prefix, to the config keys that say the same."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    return {key: name for key, name in GGUF_CONFIG_MAPPING[arch.name].items() if name} | dict(arch.keys)


def _translated(header: Header, arch: GgufArch, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that carry over one to one, and a check that none is left over."""
    table = _table(arch)
    required = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    absent = [f"{arch.name}.{key}" for key in required if key not in facts]
    if absent:
        raise ConfigError(f"{header.path} lacks the metadata keys {', '.join(absent)}.")
    for key, value in facts.items():
        if key in table or key in _UNDERSTOOD or key in _FAMILY_KEYS.get(arch.name, ()):
            continue
        if key not in _ONLY_AS or _ONLY_AS[key] != value:
            shown = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise ConfigError(f"{header.path} says {arch.name}.{key} = {shown}, which is not supported.")
    ours = {"rope_theta", "head_dim"}  # said more precisely by `_sizes`
    return {name: facts[key] for key, name in table.items() if key in facts and name not in ours}


def _sizes(header: Header, arch: GgufArch, facts: Mapping[str, Any], headers: Sequence[Header]) -> dict[str, Any]:
    for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
        if isinstance(facts.get(key), list):
            raise ConfigError(f"{header.path} has a different {arch.name}.{key} for each layer: not supported.")
    heads, hidden = (_count(header, arch, facts, key) for key in ("attention.head_count", "embedding_length"))
    derived = hidden // heads
    default = facts.get("rope.dimension_count", derived) if not arch.partial_rotary else derived
    head_dim = facts.get("attention.key_length", default)
    value_dim = facts.get("attention.value_length", head_dim)
    rotary_dim = facts.get("rope.dimension_count", head_dim)
    if value_dim != head_dim:
        raise ConfigError(f"{header.path} has key heads of {head_dim} and value heads of {value_dim}: not supported.")
    if head_dim != derived and not arch.head_dim:
        raise ConfigError(f"{header.path} has heads of {head_dim}, which {arch.architecture} cannot have ({derived}).")
    if rotary_dim != head_dim and not arch.partial_rotary:
        raise ConfigError(
            f"{header.path} turns {rotary_dim} of the {head_dim} values of a head, which {arch.architecture} cannot."
        )
    return {
        **({"head_dim": head_dim} if arch.head_dim else {}),
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "vocab_size": _vocab_size(header, facts, headers),
        "rope_parameters": rope_parameters(header, facts, head_dim, rotary_dim, headers),
    }


def _count(header: Header, arch: GgufArch, facts: Mapping[str, Any], key: str) -> int:
    value = facts[key]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{header.path} says {arch.name}.{key} = {value!r}, which is not a number of them.")
    return value


def _vocab_size(header: Header, facts: Mapping[str, Any], headers: Sequence[Header]) -> int:
    """The rows of the embedding, which the model must have, whatever the metadata says."""
    for shard in headers:
        if "token_embd.weight" in shard.by_name:
            return shard.by_name["token_embd.weight"].shape[0]
    if "vocab_size" in facts:
        return int(facts["vocab_size"])
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        raise ConfigError(f"{header.path} says nowhere how large its vocabulary is.")
    return tokens.count


def _tokens(header: Header) -> dict[str, Any]:
    found = {name: header.metadata[key] for name, key in _TOKEN_IDS.items() if key in header.metadata}
    said = [header.metadata[key] for key in _END_TOKENS if key in header.metadata]
    ends = [value for place, value in enumerate(said) if value not in said[:place]]
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _storage(headers: Sequence[Header]) -> dict[str, Any]:
    """Ties, dtype and quantisation, which the table of tensors shows."""
    names = {name for header in headers for name in header.by_name}
    found: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in names}
    types: dict[str, int] = {}
    for header in headers:
        for name, count in header.quantized_types().items():
            types[name] = types.get(name, 0) + count
    if types:
        return found | {"quantization_config": {"quant_method": "gguf", "tensors": types}}
    # Norms are float32 in every file: the half type, where there is one, is the model's.
    dtypes = {tensor.dtype for header in headers for tensor in header.tensors}
    found["dtype"] = next((dtype for dtype in ("bfloat16", "float16") if dtype in dtypes), "float32")
    return found


def _has(headers: Sequence[Header], name: str) -> bool:
    return any(name in header.by_name for header in headers)


def _nothing(header: Header, facts: Mapping[str, Any], config: Mapping[str, Any], headers: Any) -> dict[str, Any]:
    return {}


def _llama(
    header: Header, facts: Mapping[str, Any], config: Mapping[str, Any], headers: Sequence[Header]
) -> dict[str, Any]:
    return {"attention_bias": _has(headers, "blk.0.attn_q.bias"), "mlp_bias": _has(headers, "blk.0.ffn_up.bias")}


def _qwen3(
    header: Header, facts: Mapping[str, Any], config: Mapping[str, Any], headers: Sequence[Header]
) -> dict[str, Any]:
    return {"attention_bias": _has(headers, "blk.0.attn_q.bias")}


def _stablelm(
    header: Header, facts: Mapping[str, Any], config: Mapping[str, Any], headers: Sequence[Header]
) -> dict[str, Any]:
    if _has(headers, "blk.0.attn_q_norm.weight"):
        raise ConfigError(f"{header.path} is a StableLM with normalised queries and keys: not supported from GGUF.")
    return {
        "use_qkv_bias": _has(headers, "blk.0.attn_q.bias"),
        "use_parallel_residual": not _has(headers, "blk.0.ffn_norm.weight"),
    }


def _phi3(
    header: Header, facts: Mapping[str, Any], config: Mapping[str, Any], headers: Sequence[Header]
) -> dict[str, Any]:
    original = facts.get("rope.scaling.original_context_length")
    window = facts.get("attention.sliding_window")
    return {
        **({"original_max_position_embeddings": original} if original else {}),
        **({"sliding_window": window or None} if window is not None else {}),
    }


def _gemma(
    header: Header,
    facts: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    every: int,
    layers_of_27b: int,
) -> dict[str, Any]:
    """``every``: one layer in so many attends to everything. The 27B models alone scale their queries by hidden size /
    heads instead of the head size, and the file does not say so."""
    large = config["num_hidden_layers"] == layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    full = [(layer + 1) % every == 0 for layer in range(config["num_hidden_layers"])]
    return {
        "query_pre_attn_scalar": scalar,
        "layer_types": ["full_attention" if layer else "sliding_attention" for layer in full],
    }


def _gemma2(
    header: Header, facts: Mapping[str, Any], config: Mapping[str, Any], headers: Sequence[Header]
) -> dict[str, Any]:
    return _gemma(header, facts, config, every=2, layers_of_27b=46)


def _gemma3(
    header: Header, facts: Mapping[str, Any], config: Mapping[str, Any], headers: Sequence[Header]
) -> dict[str, Any]:
    pattern = facts.get("attention.sliding_window_pattern", 6)
    found = _gemma(header, facts, config, every=pattern if isinstance(pattern, int) else 6, layers_of_27b=62)
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    local = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base_swa", 10000.0)}
    return found | {
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


_FAMILY = {
    "llama": _llama,
    "qwen3": _qwen3,
    "stablelm": _stablelm,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
_FAMILY_KEYS = {
    "gemma2": ("attention.sliding_window_pattern",),
    "gemma3": ("attention.sliding_window_pattern", "rope.freq_base_swa"),
    "stablelm": ("use_parallel_residual",),  # shown by the tensors
}

assert set(_FAMILY) <= set(ARCHS)
