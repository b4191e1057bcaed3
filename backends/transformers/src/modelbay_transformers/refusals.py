"""Model types whose own code cannot say why it is not served, with the reason. Everything else is for the probe."""

from __future__ import annotations

_DRAFTS = "it drafts tokens for another model, whose keys and values it reads"

REFUSED: dict[str, str] = {
    "gemma3n": "its vision tower is built by timm, which is not tested here; gemma3n_text is its language model",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "shieldgemma2": "its checkpoints classify images (ShieldGemma2ForImageClassification), and do not generate",
    "zamba": "its layers keep a state (Mamba), which is not served",
}

_NOT_COMPARED = "its images and audio have not been compared with Transformers', so it is served text alone"

#: The same for the images and audio of models whose text is served.
MEDIA_REFUSED: dict[str, str] = {
    "mllama": "its language model attends to images apart from its tokens (cross_attention_states): not served",
    **dict.fromkeys(
        (
            "apertus1p5", "deepseek_vl_hybrid", "fun_asr_nano", "fuyu", "gemma4", "gemma4_unified", "granite_docling",
            "instructblipvideo", "llama4", "molmo2", "moss_transcribe_diarize", "muse_glimmer", "muse_spark", "omniasr",
            "phi4_multimodal", "unlimited_ocr", "vibevoice_asr",
        ),
        _NOT_COMPARED,
    ),
}  # fmt: skip
