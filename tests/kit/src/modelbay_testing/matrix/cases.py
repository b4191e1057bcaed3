"""What the matrix walks over: the architectures of the installed Transformers, per task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Task -> what a row of it is compared on.
TASKS = {"generate": "logits", "embed": "hidden states"}


@dataclass(frozen=True, slots=True)
class Case:
    """One architecture of one model type. ``overrides``: config values that make the class do this task."""

    task: str
    model_type: str
    architecture: str

    @property
    def name(self) -> str:
        return f"{self.task}/{self.model_type}"

    @property
    def overrides(self) -> dict[str, Any]:
        """A decoder made of an encoder's class, or of half a model, must be told that it is one."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if self.task != "generate":
            return {}
        default = CONFIG_MAPPING[self.model_type]
        fields = getattr(default, "__dataclass_fields__", {})
        values = {"is_decoder": True} if "is_decoder" in fields else {}
        # The classes for the decoder alone write this into their config.
        if self.architecture.endswith("ForCausalLM") and getattr(default, "is_encoder_decoder", False):
            values["is_encoder_decoder"] = False
        return values


def all_cases() -> list[Case]:
    """Every causal language model, and every base model that reads text both ways."""
    return causal_models() + text_encoders()


def causal_models() -> list[Case]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [Case("generate", model_type, name) for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()]


def text_encoders() -> list[Case]:
    """The base models of the masked language models, and those that Transformers lists as text encoders."""
    from transformers.models.auto import modeling_auto as auto

    types = [*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, *_OTHER_ENCODERS]
    cases = []
    for model_type in dict.fromkeys(types):
        name = auto.MODEL_MAPPING_NAMES.get(model_type)
        if name is not None and model_type not in _DECODERS:
            cases.append(Case("embed", model_type, name if isinstance(name, str) else name[0]))
    return cases


#: Base models that read text both ways and are in neither list.
_OTHER_ENCODERS: tuple[str, ...] = ()
#: In the list of text encoders, and decoders all the same.
_DECODERS = frozenset(("emu3", "llama4", "mllama", "molmo2_text"))
