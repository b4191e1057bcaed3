"""What one request wants of its hidden states: its own parameters over the model's `PoolingSpec` (BEHAVIOUR P1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelbay.architectures import suffix_task
from modelbay.errors import ConfigError, UsageError
from modelbay.pooling import PoolingSpec
from modelbay_runtime.sampling_params import PoolingParams

if TYPE_CHECKING:
    from modelbay.resolve import Resolution
    from modelbay_runtime.engine.prompts import Prompt


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """Args:
    kind: "hidden" (the hidden states themselves), "embed", "classify" or "score".
    modes: how one vector is made, several concatenated.
    skip: so many first tokens are not pooled (a prompt that the model does not pool).
    normalize, dimensions, activation: see `PoolingSpec`.
    """

    kind: str
    modes: tuple[str, ...] = ()
    skip: int = 0
    normalize: bool = False
    dimensions: int | None = None
    activation: str = "identity"

    @property
    def reads_last_token(self) -> bool:
        """Whether nothing but the last token's hidden state matters, so that the others may come from a cache."""
        return self.kind == "embed" and self.modes == ("last",)

    @property
    def wants_ids(self) -> bool:
        """Whether the tokens themselves matter: a classifier's head may look for the last that is no padding."""
        return self.kind in ("classify", "score")


HIDDEN = PoolingPlan("hidden")


def make_plan(
    params: PoolingParams, spec: PoolingSpec | None, *, task: str, hidden_size: int, default_mode: str, skip: int = 0
) -> PoolingPlan:
    """Args:
        task: what the model was resolved for.
        default_mode: where neither request, argument nor checkpoint says how to pool.

    Raises:
        UsageError: the model was not resolved for what is asked, or a parameter has no effect or no sense.
    """
    if params.task is None:
        _refuse(params, "hidden states", ("normalize", "dimensions", "pooling_type", "use_activation"))
        return HIDDEN
    if params.task == "embed":
        assert_task(task, "embed")
        _refuse(params, "an embedding", ("use_activation",))
        assert spec is not None, "a model that embeds has a pooling spec"
        modes = (params.pooling_type,) if params.pooling_type else spec.modes or (default_mode,)
        size = _embedding_size(spec, hidden_size, modes)
        return PoolingPlan(
            "embed",
            modes,
            skip,
            spec.normalize if params.normalize is None else params.normalize,
            _dimensions(params, spec, size),
        )
    assert_task(task, "classify")
    _refuse(params, "a classification", ("normalize", "dimensions", "pooling_type"))
    assert spec is not None, "a model that classifies has a pooling spec"
    activation = spec.score_activation if params.task == "score" else spec.activation
    return PoolingPlan(params.task, activation="identity" if params.use_activation is False else activation)


def plan_request(params: PoolingParams, prompt: Prompt, resolution: Resolution, keeps: bool) -> PoolingPlan:
    """Args:
        keeps: whether some layer keeps something of the tokens before, so that a token sees only those.

    Raises:
        UsageError: see `make_plan`.
    """
    return make_plan(
        params,
        resolution.pooling,
        task=resolution.task,
        hidden_size=resolution.config.hidden_size,
        default_mode="last" if keeps else "cls",
        skip=prompt.not_pooled,
    )


def assert_task(task: str, wanted: str) -> None:
    """Raises:
    UsageError: the model was resolved for another task; says how to resolve it for this one.
    """
    if task == wanted:
        return
    if wanted == "embed":
        hint = "Pass convert='embed' (--convert embed)."
    else:
        hint = "Name a model with a classification head, or pass convert='classify' if the checkpoint has one."
    raise UsageError(f"this model was resolved to {task}, and {wanted} was asked of it.", hint=hint)


def assert_generates(resolution: Resolution) -> None:
    """Raises:
    UsageError: the model was resolved for another task; says what does that here.
    """
    task, name = resolution.task, resolution.architecture
    if task == "generate":
        return
    if suffix_task(name) == "generate":
        hint = "Pass runner='generate' (--runner generate) to have it generate all the same."
    elif task == "embed":
        hint = (
            "Use modelbay embed (LLM.embed) for vectors, LLM.encode for hidden states, or a model with a "
            "language-model head."
        )
    else:
        hint = "Use modelbay score (LLM.score, LLM.classify), or a model with a language-model head."
    raise UsageError(f"{name} was resolved for {task}, which generates no text.", hint=hint)


def _embedding_size(spec: PoolingSpec, hidden_size: int, modes: tuple[str, ...]) -> int:
    try:
        return spec.embedding_size(hidden_size, modes)
    except ConfigError as error:  # of the checkpoint's own modes that was seen before anything was loaded
        raise UsageError(f"pooling_type={modes[0]} does not fit this model: {error.message}") from error


def _dimensions(params: PoolingParams, spec: PoolingSpec, size: int) -> int | None:
    dimensions = spec.dimensions if params.dimensions is None else params.dimensions
    if dimensions is not None and dimensions > size:
        raise UsageError(f"dimensions={dimensions}, and the embedding has {size}.")
    return dimensions


def _refuse(params: PoolingParams, what: str, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(params, name) is not None]
    if given:
        raise UsageError(f"{what} is returned as the model gives it: {', '.join(given)} would have no effect.")
