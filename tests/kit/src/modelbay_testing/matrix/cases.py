"""What the matrix walks over: the architectures of the installed Transformers, per task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Task -> what a row of it is compared on.
TASKS = {"generate": "logits", "embed": "hidden states", "classify": "a classifier's logits"}
#: Tasks of models that read more than text, compared on logits too.
IMAGE_TEXT, AUDIO_TEXT = "image-text", "audio-text"


@dataclass(frozen=True, slots=True)
class Case:
    """One architecture of one model type. ``variant``: config values that make it another model than its default."""

    task: str
    model_type: str
    architecture: str
    variant: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.task}/{self.model_type}"

    @property
    def overrides(self) -> dict[str, Any]:
        """A decoder made of an encoder's class, or of half a model, must be told that it is one."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if self.task != "generate":
            return dict(self.variant)
        default = CONFIG_MAPPING[self.model_type]
        fields = getattr(default, "__dataclass_fields__", {})
        values: dict[str, Any] = {"is_decoder": True} if "is_decoder" in fields else {}
        # The classes for the decoder alone write this into their config.
        if self.architecture.endswith("ForCausalLM") and getattr(default, "is_encoder_decoder", False):
            values["is_encoder_decoder"] = False
        return values


def all_cases() -> list[Case]:
    """Every causal language model, every base model that reads text both ways, every classifier of text, and every
    model that reads images or audio beside text."""
    return causal_models() + text_encoders() + classifiers() + media_models()


def causal_models() -> list[Case]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [Case("generate", model_type, name) for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()]


def media_models() -> list[Case]:
    """The models that Transformers lists for images and text, and those beside them in its list of all kinds."""
    from transformers.models.auto import modeling_auto as auto

    images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    others = {k: v for k, v in auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items() if k not in images}
    return [Case(IMAGE_TEXT, *named) for named in images.items()] + [
        Case(AUDIO_TEXT, *named) for named in others.items()
    ]


def classifiers() -> list[Case]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    return [Case("classify", model_type, name, (("num_labels", 3),)) for model_type, name in NAMES.items()]


def text_encoders() -> list[Case]:
    """The base models of the masked language models, those that Transformers lists as text encoders, and decoders that
    published checkpoints make read both ways."""
    from transformers.models.auto import modeling_auto as auto

    types = [*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, *_OTHER_ENCODERS]
    names = {model_type: auto.MODEL_MAPPING_NAMES.get(model_type) for model_type in types}
    cases = [
        Case("embed", model_type, name if isinstance(name, str) else name[0])
        for model_type, name in names.items()
        if name is not None and model_type not in _DECODERS
    ]
    return cases + [Case("embed", *both_ways) for both_ways in _BOTH_WAYS]


#: Base models that read text both ways and are in neither list.
_OTHER_ENCODERS = ("splinter", "openai_privacy_filter", "embedding_gemma2_text")
#: In the list of text encoders, and decoders all the same.
_DECODERS = frozenset(("emu3", "llama4", "mllama", "molmo2_text", "clip_text_model", "tipsv2_text_model"))
_NOT_CAUSAL = (("is_causal", False),)
_BOTH_WAYS = (
    ("qwen2", "Qwen2Model", _NOT_CAUSAL),
    ("qwen3", "Qwen3Model", _NOT_CAUSAL),
    ("llama", "LlamaModel", _NOT_CAUSAL),
    ("mistral", "MistralModel", _NOT_CAUSAL),
    ("gemma3_text", "Gemma3TextModel", (("use_bidirectional_attention", True),)),
)

#: What a match is limited to: said beside it.
NOTES = {
    "granitemoehybrid": "checkpoints with attention in every layer",
    "llama4": "up to attention_chunk_size tokens",
    "llama4_text": "up to attention_chunk_size tokens",
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"), "up to index_topk tokens"
    ),
    "mllama": "text alone",
    "paligemma": "one image, before the text",
}
