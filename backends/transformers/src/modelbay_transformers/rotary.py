"""Rotary embeddings whose frequencies depend on the longest position of the whole batch, fixed for one instance.

Transformers recomputes them in the forward ("dynamic" scaling, the long and short factors of "longrope"), so that a
request's output would depend on its neighbours. Here they are what they are for a sequence of ``max_model_len`` tokens.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from modelbay.errors import BackendError
from modelbay.trace import Trace

_FIXED = "fixed"


def fix_rotary(base: nn.Module, max_model_len: int, trace: Trace) -> None:
    """Fix every rotary module of ``base`` whose frequencies would follow the batch.

    Raises:
        BackendError: one that is not built as Transformers builds them.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name, module in base.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in _by_layer_type(kinds).items():
            if "dynamic" not in kind and kind != "longrope":
                continue
            prefix = "" if layer_type is None else f"{layer_type}_"
            if f"{prefix}inv_freq" not in module._buffers or kind not in ROPE_INIT_FUNCTIONS:
                raise BackendError(
                    f"{name} has rotary frequencies of type {kind!r} that cannot be fixed for one length."
                )
            arguments: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
            config: Any = module.config
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, seq_len=max_model_len, **arguments)
            module._buffers[f"{prefix}inv_freq"] = frequencies
            setattr(module, f"{prefix}attention_scaling", scaling)
            if layer_type is None:
                module.rope_type = _FIXED
            else:
                module.rope_type = {**module.rope_type, layer_type: _FIXED}
            trace.decide("build", f"rotary {name}", f"{kind}, fixed for {max_model_len} tokens", "max_model_len")


def _by_layer_type(kinds: Any) -> dict[str | None, str]:
    if isinstance(kinds, str):
        return {None: kinds}
    return {key: kind for key, kind in kinds.items() if isinstance(kind, str)} if isinstance(kinds, dict) else {}
