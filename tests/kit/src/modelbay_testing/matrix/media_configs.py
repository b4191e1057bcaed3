"""What no rule by name can know of models with towers: sizes that depend on one another in one family."""

from __future__ import annotations

from typing import Any

_PROJECTED = {"vision_config": {"projection_dim": 64}}
_OMNI = {
    "vision_start_token_id": 250, "vision_end_token_id": 251, "audio_start_token_id": 252, "audio_end_token_id": 253,
    "position_id_per_seconds": 25, "seconds_per_chunk": 2, "audio_config": {"output_dim": 64},
}  # fmt: skip
_QFORMER = {"encoder_hidden_size": 64}
_LISTENING = {"projector_config": {"encoder_hidden_size": 128}}

MEDIA: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "paligemma": {"vision_config": {"projection_dim": 64}, "projection_dim": 64},
    "janus": _PROJECTED,
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "blip-2": {"num_query_tokens": 4, "qformer_config": _QFORMER},
    "instructblip": {"num_query_tokens": 4, "qformer_config": _QFORMER},
    "llama4": {
        "text_config": {"attention_chunk_size": 512},
        "vision_config": {
            "intermediate_size": 256, "vision_output_dim": 64, "projector_output_dim": 64, "projector_input_dim": 64,
        },
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "granite_speech": _LISTENING,
    "granite_speech_plus": _LISTENING,
    "qwen3_asr": {"audio_config": {"output_dim": 64}},
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
    "apertus1p5": {"audio_config": {"codebook_dim": 64}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "nemo_speechlm": {"head_config": {"audio_hidden_size": 64}},
    "hy_v4_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32]}},
}  # fmt: skip
