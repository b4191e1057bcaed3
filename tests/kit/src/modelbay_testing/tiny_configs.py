"""A tiny config for any model type that Transformers has: every size small, every kind of layer still there.

Sizes are set by the names that configs give them, in nested configs too. Lists with one entry per layer are cut to
the first layers that show every kind; windows and chunks are shorter than a test's prompts, so that they matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 256
#: Ids from here on are given to images, sounds and the like; a test's prompts stay below.
FIRST_MEDIA_ID = 240
WINDOW = 16
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
HIDDEN = HEADS * HEAD_SIZE

# fmt: off
_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "entity_vocab_size"),
                    VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "embedding_dim",
                     "embed_dim",
                     "input_embedding_size", "output_embedding_size", "word_embed_proj_dim",
                     "hidden_size_global", "prediction_head_size", "lru_width", "attention_hidden_size",
                     "out_hidden_size", "text_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner", "d_ff", "dff",
                     "dim_ff", "hidden_dim", "d_inner", "ffn_hidden_size", "shared_intermediate_size",
                     "dense_intermediate_size", "intermediate_size_mlp", "feed_forward_size"), 2 * HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
                     "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), HIDDEN // 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
                     "swa_num_attention_heads",
                     "encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads",
                     "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "kv_n_heads",
                     "num_global_key_value_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "d_head", "d_kv", "kv_channels", "attention_head_size",
                     "v_head_dim", "qk_nope_head_dim", "global_head_dim", "attention_head_dim", "index_head_dim",
                     "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "swa_v_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), HEAD_SIZE // 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), HIDDEN // 2),
    "qk_head_dim": HEAD_SIZE + HEAD_SIZE // 2,
    "index_n_heads": 2, "index_topk": 512,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group",), 2), "topk_group": 1,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 512),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention", "attention_window_size",
                     "sliding_window_size", "attention_window"), WINDOW),
    "rel_extent": WINDOW, "keep_window_size": WINDOW,
    "type_vocab_size": 2, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "hidden_size_per_layer_input": 8, "query_pre_attn_scalar": 24,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "state_size": 16, "ssm_state_size": 16, "time_step_rank": 4, "chunk_size": 16, "mamba_chunk_size": 16,
    "qk_rope_dim": HEAD_SIZE // 2, "router_hidden_size": 16, "floor_scale": 16,
    "intra_bottleneck_size": 32, "num_landmarks": 8, "segment_means_seq_len": 8,
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
           "num_encoder_layers", "num_decoder_layers", "depth", "num_layers_per_stack")
_ORDINARY_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# fmt: on

_SHARED_KV = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "intermediate_size": [2 * HIDDEN] * 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "activation_sparsity_pattern": [0.95, 0.0] * 3,
    "laurel_rank": 8,
}  # fmt: skip

_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}  # fmt: skip

#: The class reads the share, and the config has the number beside it.
_HALF_TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}

#: What no rule by name can know: sizes that depend on one another in one family.
_FAMILIES: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "longcat_flash": {"head_dim": HEAD_SIZE // 2, "qk_head_dim": HEAD_SIZE + HEAD_SIZE // 2, "zero_expert_num": 2},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "gemma3n_text": _SHARED_KV,
    "gemma3n": {"text_config": _SHARED_KV},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    # The checkpoints with attention in every layer; with state-space layers it is another model.
    "granitemoehybrid": {"layer_types": ["full_attention", "full_attention"], "position_embedding_type": "rope"},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "dots3_note": {
        "text_config": {"num_key_value_heads": HEADS},
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "esmc": {"num_key_value_heads": HEADS},
    "esm": {"vocab_size": VOCAB_SIZE, "pad_token_id": 1, "mask_token_id": 250, "position_embedding_type": "rotary"},
    # Chunks as long as a sequence may be: what is served of it.
    "llama4_text": {"attention_chunk_size": 512},
    "llama4": {"text_config": {"attention_chunk_size": 512}},
    "minimax_m3_vl_text": _HALF_TURNS,
    "minimax_m3_vl": {"text_config": _HALF_TURNS},
    "mobilebert": {"intra_bottleneck_size": HIDDEN},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config object of this model type: hidden size 64, 4 heads, 2 KV heads, 256 tokens, 2 layers or as many as it
    has kinds of layers. ``overrides`` are config values."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrink(CONFIG_MAPPING[model_type], {**_FAMILIES.get(model_type, {}), **overrides})


def _shrink(cls: Any, overrides: Mapping[str, Any]) -> Any:
    default = _default(cls, overrides)
    names = _names(default)
    values = {name: _BY_NAME[name] for name in names if name in _BY_NAME and _is_size(default, name)}
    if "kv_lora_rank" in names:
        values.pop("head_dim", None)  # it follows from its parts, and keys and values are unpacked for every head
        values.pop("num_key_value_heads", None)
        if "num_key_value_heads" in names:
            values["num_key_value_heads"] = HEADS
    elif "head_dim" in names:
        values["head_dim"] = HEAD_SIZE
    values.update(_layers(default, names))
    values.update(_ids(default, names))
    values.update(_mrope(default))
    for name in cls.sub_configs:
        if name in default.__dict__ and default.__dict__[name] is not None:
            inner = type(default.__dict__[name])
            given = overrides.get(name, {})
            values[name] = _shrink(inner, given) if isinstance(given, Mapping) else given
    kept = {name: value for name, value in overrides.items() if name not in cls.sub_configs}
    return cls(**{**values, **kept})


def _default(cls: Any, overrides: Mapping[str, Any]) -> Any:
    try:
        return cls()
    except Exception:  # a class whose own defaults contradict each other
        return cls(**overrides)


def _names(default: Any) -> list[str]:
    return [name for name in vars(default) if not name.startswith("_")]


def _is_size(default: Any, name: str) -> bool:
    value = vars(default)[name]
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, int) for item in value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layers(default: Any, names: list[str]) -> dict[str, Any]:
    """The number of layers, and every list that says something of each layer, cut to layers that show every kind."""
    counts = [name for name in names if name in _LAYERS and isinstance(vars(default)[name], int)]
    if not counts:
        return {}
    total = vars(default)[counts[0]]
    lists = {
        name: list(vars(default)[name])
        for name in names
        if isinstance(vars(default)[name], (list, tuple)) and len(vars(default)[name]) == total > 2
    }
    picked = _covering(total, list(lists.values()))
    values: dict[str, Any] = {name: min(len(picked), vars(default)[name]) for name in counts}
    for name, items in lists.items():
        values[name] = [items[i] for i in picked]
        if items == list(range(total)):
            values[name] = list(range(len(picked)))
        elif name in _BY_NAME:
            values[name] = [_BY_NAME[name]] * len(picked)
        elif "heads" in name:
            values[name] = [HEADS] * len(picked)
    return values


def _covering(total: int, lists: list[list[Any]]) -> list[int]:
    """The first layers, at least two, between which every value of every list is seen."""
    seen: set[tuple[int, str]] = set()
    picked: list[int] = []
    for layer in range(total):
        shown = {
            (i, str(items[layer]))
            for i, items in enumerate(lists)
            if not isinstance(items[layer], int) or items[layer] in (0, 1)
        }
        if not shown <= seen:
            picked.append(layer)
            seen |= shown
    for layer in range(total):
        if len(picked) >= min(2, total):
            break
        if layer not in picked:
            picked.append(layer)
    return sorted(picked)


def _mrope(default: Any) -> dict[str, Any]:
    """Rotary dimensions are dealt out between time, height and width: as few as a tiny head has, in the same order."""
    rope = getattr(default, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope.get("mrope_section"):
        return {}
    sections = rope["mrope_section"]
    room = int(HEAD_SIZE // 2 * rope.get("partial_rotary_factor", 1.0))
    rest = [max(1, section * room // sum(sections)) for section in sections[1:]]
    return {"rope_parameters": {**rope, "mrope_section": [room - sum(rest), *rest]}}


def _ids(default: Any, names: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    media = FIRST_MEDIA_ID
    for name in names:
        value = vars(default)[name]
        if not name.endswith(("_token_id", "_token_index")) or value is None:
            continue
        if name in _ORDINARY_IDS:
            values[name] = _ORDINARY_IDS[name]
        else:
            values[name] = media
            media += 1
    return values
