"""A model opened by a command: what it cannot do is refused before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from modelbay.resolve import Resolution, resolve
from modelbay_runtime.llm import LLM
from modelbay_runtime.pooling.plan import assert_generates, assert_task

Wanted = Literal["generate", "score"]


def open_llm(model: str, kwargs: Mapping[str, Any], wanted: Wanted) -> LLM:
    """The model, loaded for what the command does.

    Raises:
        UsageError: it was resolved for something else; nothing was loaded.
        ModelbayError: see `LLM`.
    """
    resolution = resolve(model, **kwargs)
    _check(resolution, wanted)
    return LLM.of(resolution)


def _check(resolution: Resolution, wanted: Wanted) -> None:
    if wanted == "generate":
        assert_generates(resolution)
    elif resolution.task != "classify":  # a cross-encoder; else the cosine of two embeddings
        assert_task(resolution.task, "embed")
