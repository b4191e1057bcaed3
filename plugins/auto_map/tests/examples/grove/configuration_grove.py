"""Written for Transformers 4: rope_theta and rope_scaling are read from the dict as it stands on disk."""

from transformers import PretrainedConfig


class GroveConfig(PretrainedConfig):
    model_type = "grove"

    base_model_tp_plan = {
        "layers.*.self_attn.qkv": "packed_colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.moe.experts": "moe_tp_experts",
        "layers.*.moe.experts.gate_up_proj": "packed_colwise",
        "layers.*.moe.experts.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(self, vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **kwargs):
        rope_theta = kwargs.pop("rope_theta", 10000.0)
        rope_scaling = kwargs.pop("rope_scaling", None)
        if rope_scaling is not None and set(rope_scaling) != {"type", "factor"}:
            raise ValueError(f"rope_scaling must have exactly type and factor, got {rope_scaling}")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = kwargs.pop("num_key_value_heads", num_attention_heads)
        self.intermediate_size = kwargs.pop("intermediate_size", 32)
        self.num_local_experts = kwargs.pop("num_local_experts", 4)
        self.num_experts_per_tok = kwargs.pop("num_experts_per_tok", 2)
        self.max_position_embeddings = kwargs.pop("max_position_embeddings", 512)
        self.rms_norm_eps = kwargs.pop("rms_norm_eps", 1e-5)
        self.theta = float(rope_theta)
        self.stretch = float(rope_scaling["factor"]) if rope_scaling else 1.0
        super().__init__(**kwargs)
