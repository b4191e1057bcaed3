"""The config of sentence-transformers' module Transformer: how texts become hidden states there.

What would change the numbers and is not done here is refused by name; what only says how the library loads or computes
(its device, its backend, padding) is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelbay.errors import ConfigError
from modelbay.pooling.values import boolean, positive

if TYPE_CHECKING:
    from modelbay.source import ModelFiles

#: Where it stands: the first that is there. Older versions called the file after the kind of model.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TRANSFORMER_FILES = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)

_READ = {"max_seq_length", "do_lower_case", "modality_config"}
_WITHOUT_EFFECT = {"unpad_inputs", "backend", "cache_dir", "model_name_or_path"}
#: Key -> the values of it that say what is done here.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction", "sequence-classification"),
    "module_output_name": ("token_embeddings", "scores"),
    "tokenizer_name_or_path": (),
    "query_length": (),
    "document_length": (),
    "query_expansion": (),
}
#: Arguments that the library hands to Transformers' loaders, by old and new names; those that change no number.
_LOADING = {"model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"}
_LOADING_WITHOUT_EFFECT = {
    "trust_remote_code", "attn_implementation", "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage",
    "use_safetensors", "use_cache", "use_fast", "padding_side",
}  # fmt: skip
#: Of the arguments for processors: those for other inputs than texts.
_PROCESSING = "processing_kwargs"
_NOT_OF_TEXTS = {"audio", "image", "video", "chat_template"}
_TEXT_METHOD = ("forward",)
_TEXT_OUTPUT = ("last_hidden_state", "logits")


@dataclass(frozen=True, slots=True)
class TransformerModule:
    """Args:
    lower_case: whether texts are lower-cased first.
    as_messages: whether texts are put into the chat template first.
    """

    lower_case: bool = False
    as_messages: bool = False


def max_length(files: ModelFiles) -> tuple[int, str] | None:
    """The longest text in tokens that sentence-transformers gives this model, and who says so; None if nobody does.

    Raises:
        ConfigError: it is no number of tokens.
    """
    name, config = _config(files)
    length = positive(config, "max_seq_length", "number of tokens", name)
    return None if length is None else (length, f"{name} (max_seq_length)")


def read_transformer(files: ModelFiles) -> TransformerModule:
    """What the module does besides running the model; the defaults where there is no such file.

    Raises:
        ConfigError: a key that is not known, or a value that says what is not done here.
    """
    name, config = _config(files)
    given = {key: value for key, value in config.items() if value not in (None, {}, [])}
    known = {*_READ, *_WITHOUT_EFFECT, *_ONLY, *_LOADING, _PROCESSING}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"{name} has {', '.join(unknown)}, which is not known here.")
    for key, values in _ONLY.items():
        if key in given and given[key] not in values:
            raise ConfigError(f"{name} has {key} {given[key]!r}, which is not served.")
    for key in sorted(_LOADING & set(given)):
        _check_arguments(given[key], _LOADING_WITHOUT_EFFECT, f"{name}: {key}")
    _check_arguments(given.get(_PROCESSING, {}), _NOT_OF_TEXTS, f"{name}: {_PROCESSING}")
    modalities = given.get("modality_config", {})
    if not isinstance(modalities, Mapping):
        raise ConfigError(f"{name} has modality_config {modalities!r}, which is no object.")
    _check_text(modalities.get("text") or {}, name)
    return TransformerModule(boolean(config, "do_lower_case", False, name), "message" in modalities)


def _config(files: ModelFiles) -> tuple[str, dict[str, Any]]:
    """The file and what is in it."""
    name = next((name for name in TRANSFORMER_FILES if files.has(name)), TRANSFORMER_FILES[0])
    return name, files.read_json(name) or {}


def _check_arguments(given: Any, without_effect: set[str], where: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}, which is no object.")
    served = {key for key, value in given.items() if key in without_effect or value in (None, {}, [])}
    if set(given) - served:
        raise ConfigError(f"{where} has {', '.join(sorted(set(given) - served))}, which is not served.")


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, Mapping):
        raise ConfigError(f"{name}: modality_config has text {text!r}, which is no object.")
    for key, values in (("method", _TEXT_METHOD), ("method_output_name", _TEXT_OUTPUT)):
        if text.get(key) not in (None, *values):
            raise ConfigError(f"{name}: modality_config has {key} {text[key]!r} for text, which is not served.")
