"""The names that pooling configs use, and ours. Classes are named by their import path; nothing here imports one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelbay.errors import ConfigError

#: Ways to make one vector of a sequence: sentence-transformers' name -> ours.
MODES: Mapping[str, str] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
#: The older schema has a key for each; several that are true are concatenated in this order.
MODE_KEYS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
#: Activations by the last part of the name of their class in ``torch.nn``.
ACTIVATIONS = {
    "Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}  # fmt: skip
#: Those that make scores of logits.
SCORE_ACTIVATIONS = ("identity", "sigmoid", "softmax", "tanh")


def activation_name(value: Any, where: str) -> str:
    """``torch.nn.modules.activation.Tanh`` -> ``tanh``.

    Raises:
        ConfigError: another class, which would have to be imported to be known.
    """
    path = str(value)
    name = path.rpartition(".")[2]
    if path.startswith("torch.nn.") and name in ACTIVATIONS:
        return ACTIVATIONS[name]
    known = ", ".join(f"torch.nn.{name}" for name in ACTIVATIONS)
    raise ConfigError(f"{where} names the activation {path!r}, which is not known here; known: {known}.")
