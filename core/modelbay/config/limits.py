"""What no config means: looked at before a class or a patch reads it, so that a damaged file costs no memory (C1).

Everything is built before its weights are looked for, and some of it (rotary tables, lists of one entry for each
layer) in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelbay.config.names import LAYERS, names_of
from modelbay.errors import ConfigError

MAX_LAYERS = 10_000
MAX_EXPERTS = 16_384
MAX_HEAD_SIZE = 4_096

_EXPERTS = (*names_of("num_experts"), "n_shared_experts")
_HEAD_SIZES = (
    *names_of("head_dim"), "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim", "global_head_dim",
    "attention_head_dim",
)  # fmt: skip
_WIDTHS = (
    *names_of("hidden_size"), *names_of("intermediate_size"), *names_of("num_attention_heads"),
    *names_of("num_key_value_heads"), "moe_intermediate_size", "kv_lora_rank", "q_lora_rank",
)  # fmt: skip
#: key -> the most that it may be, and what of.
_MOST: dict[str, tuple[int, str]] = {
    **dict.fromkeys(LAYERS, (MAX_LAYERS, "layers")),
    **dict.fromkeys(_EXPERTS, (MAX_EXPERTS, "experts")),
    **dict.fromkeys(_HEAD_SIZES, (MAX_HEAD_SIZE, "dimensions of a head")),
    **dict.fromkeys(_WIDTHS, (1 << 24, "of these")),
    "vocab_size": (1 << 28, "tokens"),
    "num_labels": (1_000_000, "labels"),
    "image_size": (16_384, "pixels along a side"),
}
#: Objects whose keys are names of whatever.
_NAMES = ("id2label", "label2id")
#: Read by core itself; each family's own are for its config class.
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "multi_query", "is_encoder_decoder")


def check_values(config: Mapping[str, Any], where: tuple[str, ...] = ()) -> None:
    """Refuse sizes beyond anything real and values of another type, here and in every sub-config.

    Raises:
        ConfigError: naming the key, what it says, and the limit.
    """
    for key, value in config.items():
        name = ".".join((*where, str(key)))
        if key in _MOST:
            _check_size(name, value, *_MOST[key])
        elif key in _FLAGS and value not in (None, False, True):
            raise ConfigError(f"the config's {name} must be true or false, got {value!r}.")
        elif key == "architectures":
            check_names(name, value)
        if isinstance(value, Mapping) and key not in _NAMES:
            check_values(value, (*where, str(key)))


def check_names(name: str, value: Any) -> None:
    """``architectures`` is a list of names; one name alone is read as such a list."""
    listed = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if not (value is None or isinstance(value, str) or listed):
        raise ConfigError(f"the config's {name} must be a list of names, got {value!r}.")


def check_size(name: str, value: int, most: int, what: str) -> None:
    """Refuse a size beyond anything real."""
    if value > most:
        raise ConfigError(f"the config's {name} is {value:,}; no model has more than {most:,} {what}. A damaged file?")


def _check_size(name: str, value: Any, most: int, what: str) -> None:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, int | float):
            check_size(name, item, most, what)  # type: ignore[arg-type]  # its type is checked where it is read
