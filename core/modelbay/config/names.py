"""The names that configs give to the same fact."""

from __future__ import annotations

from collections.abc import Mapping

#: The common names of each fact besides its canonical one. A family's own further names are plugin data.
COMMON_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels", "d_kv"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
}


def names_of(fact: str) -> tuple[str, ...]:
    """The canonical name first."""
    return (fact, *COMMON_ALIASES.get(fact, ()))


#: Counts of layers, those of towers and of models in two halves too.
LAYERS = (
    *names_of("num_hidden_layers"),
    "encoder_layers",
    "decoder_layers",
    "depth",
    "num_encoder_layers",
    "num_decoder_layers",
)
