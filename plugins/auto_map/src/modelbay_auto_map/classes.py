"""The classes that ``auto_map`` names, through the gate for other people's code, and what they must be."""

from __future__ import annotations

from typing import Any

from modelbay.architectures import suffix_task
from modelbay.errors import BackendError
from modelbay.resolve import Resolution
from modelbay.trust import load_remote_class
from modelbay_transformers.classes import ModelClasses, own_config


def find_classes(resolution: Resolution) -> ModelClasses:
    """Import the base model's class, and, for a checkpoint with a head, the class around it where there is one.

    Raises:
        TrustError, RemoteCodeError: see `modelbay.trust.load_remote_class`.
        BackendError: a class is of the wrong kind.
    """
    auto_map = resolution.config.raw["auto_map"]
    base = _load(resolution, auto_map["AutoModel"], "the model class")
    _check_class(base, f"auto_map.AutoModel = {auto_map['AutoModel']}")
    head = None
    if "AutoModelForCausalLM" in auto_map and "generate" in (resolution.task, suffix_task(resolution.architecture)):
        head = _load(resolution, auto_map["AutoModelForCausalLM"], "the language model class")
        _check_class(head, f"auto_map.AutoModelForCausalLM = {auto_map['AutoModelForCausalLM']}")
    return ModelClasses(own_config(resolution.config), base, head, resolution.files.reference)


def _load(resolution: Resolution, reference: str, what: str) -> Any:
    args = resolution.args
    return load_remote_class(
        reference,
        resolution.files,
        trusted=args.trust_remote_code,
        code_revision=args.code_revision,
        what=what,
        trace=resolution.trace,
    )


def _check_class(found: Any, where: str) -> None:
    from transformers import PreTrainedModel

    if not issubclass(found, PreTrainedModel):
        bases = ", ".join(base.__name__ for base in found.__bases__)
        raise BackendError(
            f"{where} is no transformers.PreTrainedModel (its base: {bases}), so its attention cannot be replaced."
        )
    if not found._can_set_attn_implementation():
        raise BackendError(
            f"{where} does not let its attention be set: the attention in its file does not ask "
            "ALL_ATTENTION_FUNCTIONS.get_interface(…) for the function it calls."
        )
