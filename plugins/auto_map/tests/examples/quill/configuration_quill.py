from transformers import PretrainedConfig


class QuillConfig(PretrainedConfig):
    model_type = "quill"

    # The projections have names of their own, so nothing can be inferred: each is listed.
    base_model_tp_plan = {
        "blocks.*.attention.query": "colwise",
        "blocks.*.attention.key": "colwise",
        "blocks.*.attention.value": "colwise",
        "blocks.*.attention.output": "rowwise",
        "blocks.*.widen": "colwise",
        "blocks.*.narrow": "rowwise",
    }
    base_model_pp_plan = {
        "words": (["input_ids"], ["inputs_embeds"]),
        "places": (["position_ids"], ["inputs_embeds"]),
        "blocks": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "final_norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(
        self,
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        layer_norm_eps=1e-5,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        super().__init__(**kwargs)
