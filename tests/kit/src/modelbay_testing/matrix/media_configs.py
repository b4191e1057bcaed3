"""Tiny configs of models with towers: by rule, and what no rule by name can know of one family."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from modelbay_testing.matrix.cases import Case
from modelbay_testing.matrix.media_inputs import vision_of
from modelbay_testing.matrix.reference import randomize
from modelbay_testing.tiny_configs import FIRST_MEDIA_ID, VOCAB_SIZE, tiny_config

_PROJECTED = {"vision_config": {"projection_dim": 64}}
_OMNI = {
    "vision_start_token_id": 250, "vision_end_token_id": 251, "audio_start_token_id": 252, "audio_end_token_id": 253,
    "position_id_per_seconds": 25, "seconds_per_chunk": 2, "audio_config": {"output_dim": 64},
}  # fmt: skip
_QFORMER = {"encoder_hidden_size": 64}
_LISTENING = {"projector_config": {"encoder_hidden_size": 128}}

#: Sizes that depend on one another in one family.
_FAMILIES: dict[str, dict[str, Any]] = {
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


def media_config(case: Case, overrides: Mapping[str, Any] | None = None) -> Any:
    """A tiny config whose images are small too. ``overrides``: in the place of the family's."""
    given = dict(_FAMILIES.get(case.model_type, {}) if overrides is None else overrides)
    config = tiny_config(case.model_type, **given)
    vision = vision_of(config)
    patch, size = getattr(vision, "patch_size", None), getattr(vision, "image_size", None)
    if "image_size" not in str(given) and isinstance(patch, int) and isinstance(size, int):
        vision.image_size = 4 * patch
    for name in ("audio_config", "encoder_config"):
        audio: Any = getattr(config, name, None)
        if getattr(audio, "max_source_positions", None) and "max_source_positions" not in str(given):
            audio.max_source_positions = 32
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    if isinstance(pinpoints, (list, tuple)):
        side = vision.image_size
        config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side]]
    for number, name in enumerate(("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")):
        if hasattr(config, name) and not {name, name.replace("index", "id")} & set(given):
            _set_id(config, name, FIRST_MEDIA_ID + number // 2)
    _share_out_rotary(config, case.architecture)
    config.architectures = [case.architecture]
    return config


def _set_id(config: Any, name: str, value: int) -> None:
    """Ids that a prompt's text does not have."""
    found = getattr(config, name)
    if found is None or (isinstance(found, int) and not FIRST_MEDIA_ID <= found < VOCAB_SIZE):
        setattr(config, name, value)


def _share_out_rotary(config: Any, architecture: str) -> None:
    """Classes with positions in several rows have a default for heads of 128."""
    import transformers

    base = getattr(transformers, architecture.replace("ForConditionalGeneration", "Model"), None)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if (
        hasattr(base, "get_rope_index")
        and isinstance(rope, dict)
        and "rope_type" in rope
        and "mrope_section" not in rope
    ):
        room = int(text.head_dim if getattr(text, "head_dim", None) else text.hidden_size // text.num_attention_heads)
        room = int(room * rope.get("partial_rotary_factor", 1.0)) // 2
        text.rope_parameters = {**rope, "mrope_section": [room - 2 * (room // 3), room // 3, room // 3]}


def media_reference(config: Any, architecture: str) -> Any:
    """Transformers' own model, every parameter random."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, architecture)._from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    randomize(model)
    return model
