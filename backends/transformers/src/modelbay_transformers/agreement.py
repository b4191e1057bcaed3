"""What the config says of a model's layers, against what their code was seen to do, before any weight is loaded.

Transformers' classes leave out what they do not read. A config that says more than its class does is refused: it was
written for another model, and one of the two would give other numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from modelbay.config import ModelConfig
from modelbay.errors import BackendError
from modelbay.rope import PARTIAL_KEYS, RopeSpec
from modelbay.trace import Trace
from modelbay_transformers.probe import LONGEST, AttentionFacts
from modelbay_transformers.turning import turning_dimensions


def check_agreement(
    base: nn.Module, attention: Sequence[AttentionFacts], config: ModelConfig, longest: int, trace: Trace
) -> None:
    """Compare windows and rotary embeddings; what the config does not say itself is corrected in the trace.

    Args:
        longest: the longest sequence that will be served, in tokens.

    Raises:
        BackendError: the config says otherwise, with both values.
    """
    name = type(base).__name__
    _check_windows(name, attention, config, longest)
    _check_rotary(name, base, attention, config, longest, trace)


def _check_windows(name: str, attention: Sequence[AttentionFacts], config: ModelConfig, longest: int) -> None:
    if config.sources.get("layer_types", "derived").startswith("derived"):
        return
    window = config.sliding_window
    seen_in_full = window is not None and window < min(longest, LONGEST)
    for facts in attention:
        kind = _kind(facts, config)
        if kind == "full" and facts.window is not None:
            does = f"attends over a window of {facts.window}"
        elif kind == "sliding" and facts.window is None and seen_in_full:
            does = f"attends to everything (sliding_window {window})"
        else:
            continue
        raise BackendError(
            f"the config's layer_types have layer {facts.layer} as {kind!r}, and {name} {does} there.",
            hint='Say what is meant with hf_overrides, e.g. {"layer_types": null}.',
        )


def _kind(facts: AttentionFacts, config: ModelConfig) -> str:
    return config.layer_types[facts.layer] if facts.layer < len(config.layer_types) else "full"


def _check_rotary(
    name: str,
    base: nn.Module,
    attention: Sequence[AttentionFacts],
    config: ModelConfig,
    longest: int,
    trace: Trace,
) -> None:
    specs = {facts.module: (_kind(facts, config), config.rope_for(_kind(facts, config))) for facts in attention}
    kinds = {module: kind for module, (kind, spec) in specs.items() if spec is not None}
    if not kinds:
        return
    size = {kinds[facts.module]: facts.head_size for facts in attention if facts.module in kinds}
    seen: dict[str, str] = {}
    for kind, turning in turning_dimensions(base, kinds, longest).items():
        spec = config.rope_for(kind)
        if spec is None or not turning:
            continue
        if turning != spec.rotary_dim:
            in_pairs = spec.rotary_dim + spec.rotary_dim % 2
            if spec.rotary_dim != config.head_size and turning != in_pairs:
                raise _contradicted(name, turning, size[kind], spec, config)
            _correct(trace, kind if kind in config.rope else "default", turning)
        seen[kind] = f"{turning} of {size[kind]}"
    if seen:
        values = set(seen.values())
        answer: Any = values.pop() if len(values) == 1 else seen
        trace.decide("build", "dimensions of a head that turn", answer, "probe: keys at several positions")


def _contradicted(name: str, turning: int, size: int, spec: RopeSpec, config: ModelConfig) -> BackendError:
    key = _saying(config)
    return BackendError(
        f"{name} turns {turning} of {size} dimensions of each head, and by the config's {key} it is "
        f"{spec.rotary_dim} (RoPE): the class does not read it.",
        hint="Take another model_impl, or if the class is right, say so with hf_overrides, e.g. "
        f'{{"{key}": {turning if key == "rotary_dim" else f"{turning / size:g}"}}}.',
    )


def _saying(config: ModelConfig) -> str:
    """The key that says how much turns."""
    keys = (*PARTIAL_KEYS, "rotary_dim")
    return next((key for key in keys if config.get(key) is not None), "partial_rotary_factor")


def _correct(trace: Trace, kind: str, turning: int) -> None:
    """What was taken for granted, since nobody says it, is not what runs: the trace has what does."""
    for index, decision in enumerate(trace.decisions):
        if (decision.stage, decision.question) == ("config", "rope"):
            answer = {**decision.answer, kind: {**decision.answer[kind], "rotary_dim": turning}}
            prefix = "" if kind == "default" else f"{kind}."
            source = f"{decision.source}; {prefix}rotary_dim corrected: probe"
            trace.decisions[index] = dataclasses.replace(decision, answer=answer, source=source)
