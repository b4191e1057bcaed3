"""What the kernels can serve, as reasons to say no. Needs neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_HEAD_SIZE = 256
MAX_GROUP = 128
MAX_NORM_SIZE = 32768

#: Activations of `modelbay_triton.activation`, under all names that configs use -> the function.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

_ATTENTION_FACTS = {
    "layer", "dtype", "device", "head_size", "v_head_size", "num_heads", "num_kv_heads", "window", "softcap", "sinks",
}  # fmt: skip


def attention(facts: Mapping[str, Any]) -> str | None:
    unknown = sorted(name for name in facts.keys() - _ATTENTION_FACTS if facts[name] not in (None, False))
    if unknown:
        return f"knows nothing of {', '.join(unknown)}"
    for name in ("head_size", "v_head_size"):
        if facts[name] > MAX_HEAD_SIZE:
            return f"{name} is {facts[name]}, at most {MAX_HEAD_SIZE} fits"
    group = facts["num_heads"] // facts["num_kv_heads"]
    if group > MAX_GROUP:
        return f"{group} query heads share a kv head, at most {MAX_GROUP} fit"
    return None


def rms_norm(facts: Mapping[str, Any]) -> str | None:
    if facts["size"] > MAX_NORM_SIZE:
        return f"size is {facts['size']}, at most {MAX_NORM_SIZE} fits"
    return None


def act_and_mul(facts: Mapping[str, Any]) -> str | None:
    if facts["activation"] not in ACTIVATIONS:
        return f"activation {facts['activation']!r} is not among {', '.join(ACTIVATIONS)}"
    return None
