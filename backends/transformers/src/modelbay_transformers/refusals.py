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
