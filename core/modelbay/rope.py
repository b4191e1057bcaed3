"""RoPE's one normal form (BEHAVIOUR C5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer.

    ``type``: default, linear, dynamic, yarn, longrope, llama3 (Transformers' names). ``theta``: the base.
    ``rotary_dim``: how many of the head's dimensions turn (head_size × partial_rotary_factor).
    ``parameters``: the remaining keys of ``rope_parameters`` (factor, low_freq_factor, mrope_section …).
    """

    type: str
    theta: float
    rotary_dim: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
