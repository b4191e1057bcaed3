"""What will be done with hidden states: an argument over the checkpoint over the architecture's default (P1)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from modelbay.errors import ConfigError, UsageError
from modelbay.pooling.modules import MODULES, SENTENCE, SentenceModules, Stage, read_modules
from modelbay.pooling.names import MODES as _MODES
from modelbay.pooling.names import SCORE_ACTIVATIONS, activation_name
from modelbay.pooling.values import positive

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

#: How one vector is made of a sequence's hidden states.
MODES = tuple(_MODES.values())
#: The key of a stage's config that says how many numbers it takes.
_INPUT_SIZES: Mapping[str, str] = {"dense": "in_features", "layer_norm": "dimension"}
_FORMER_ACTIVATION = "sbert_ce_default_activation_function"
_ARGUMENTS = ("pooling_type", "normalize", "dimensions", "activation", "use_activation")
#: What the library that writes ``problem_type`` does with the logits.
_PROBLEMS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_RERANKER = "CrossEncoder"


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """How hidden states become what was asked for, unless a request says otherwise. Picklable.

    Args:
        modes: of `MODES`, several concatenated; None: "cls" where tokens see each other both ways, else "last".
        stages: what is done to the vector, in order.
        normalize: whether it is then scaled to length 1.
        dimensions: how many of its numbers are kept; cut before the scaling.
        activation, score_activation: what makes probabilities (scores) of a classifier's logits: "identity",
            "sigmoid", "softmax", "tanh".
        num_labels: of a classifier.
        pad_token_id: what a causal classifier skips at the end of its input.
        include_prompt, prompts, default_prompt, lower_case, as_messages: see `SentenceModules`.
    """

    modes: tuple[str, ...] | None = None
    stages: tuple[Stage, ...] = ()
    normalize: bool = True
    dimensions: int | None = None
    activation: str = "identity"
    score_activation: str = "identity"
    num_labels: int | None = None
    pad_token_id: int | None = None
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False
    as_messages: bool = False

    def embedding_size(self, hidden_size: int, modes: tuple[str, ...]) -> int:
        """Numbers of an embedding before any are cut.

        Raises:
            ConfigError: a stage takes vectors of another size than it would get.
        """
        size, known = hidden_size * len(modes), True
        for stage in self.stages:
            where = f"{stage.folder}/config.json"
            known = known and stage.kind != "remote"  # whose config nobody here can read
            takes = positive(stage.config, _INPUT_SIZES.get(stage.kind, ""), "size", where)
            if known and takes is not None and takes != size:
                raise ConfigError(
                    f"{where} is for vectors of {takes} numbers, and those of {'+'.join(modes)} have {size} there."
                )
            size = positive(stage.config, "out_features", "size", where) or size
        return size


def resolve_pooling(
    files: ModelFiles, config: ModelConfig, task: str, args: EngineArgs, trace: Trace
) -> PoolingSpec | None:
    """None for a model that generates.

    Raises:
        UsageError: an argument makes no sense.
        ConfigError, TrustError: what the checkpoint says cannot be read, or is not served.
    """
    given = check_arguments(args.pooler_config)
    if task == "generate":
        if given:
            raise UsageError(
                "pooler_config is about pooling, and this model was resolved to generate.",
                hint="Pass runner='pooling' (--runner pooling).",
            )
        return None
    modules = read_modules(files, trusted=args.trust_remote_code)
    if task == "embed":
        return _embedding(modules, given, config, trace)
    return _classifier(modules, given, config, trace)


def check_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The argument ``pooler_config``; null is the same as absent.

    Raises:
        UsageError: a name or a value that does not exist.
    """
    values = {key: value for key, value in (given or {}).items() if value is not None}
    for key, value in values.items():
        if key not in _ARGUMENTS:
            near = difflib.get_close_matches(key, _ARGUMENTS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(_ARGUMENTS)}."
            raise UsageError(f"pooler_config has no {key!r}.", hint=hint)
        if key in ("normalize", "use_activation") and not isinstance(value, bool):
            raise UsageError(f"pooler_config: {key} must be true or false, got {value!r}.")
        if key == "dimensions":
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise UsageError(f"pooler_config: dimensions must be a positive integer, got {value!r}.")
            values = {**values, key: int(value)}
        if key == "pooling_type":
            values = {**values, key: _choice(value, key, MODES)}
        if key == "activation":
            values = {**values, key: _choice(value, key, SCORE_ACTIVATIONS)}
    return values


def _choice(value: Any, key: str, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value.lower() not in known:
        raise UsageError(f"pooler_config: {key} must be one of {', '.join(known)}, got {value!r}.")
    return value.lower()


def _embedding(modules: SentenceModules, given: dict[str, Any], config: ModelConfig, trace: Trace) -> PoolingSpec:
    _refuse(given, ("activation", "use_activation"), "classifiers")
    if modules.size is not None and modules.size != config.hidden_size:
        raise ConfigError(
            f"{modules.source} is for vectors of {modules.size} numbers, and the model's have {config.hidden_size}."
        )
    modes, modes_source = modules.modes, modules.source
    if "pooling_type" in given:
        modes, modes_source = (given["pooling_type"],), trace.argument("pooler_config")
    stages, normalize = modules.stages, True
    source = "nothing says otherwise"
    if modules.listed:
        # Scaling that comes last is not a stage of its own: dimensions are cut before it (CASES 38).
        normalize = bool(stages) and stages[-1].kind == "normalize"
        stages = stages[:-1] if normalize else stages
        source = MODULES
    if "normalize" in given:
        normalize, source = given["normalize"], trace.argument("pooler_config")
    shown = "+".join(modes) if modes else "cls for an encoder, last for a decoder"
    trace.decide("architectures", "pooling", shown, modes_source or "default")
    if stages:
        trace.decide("architectures", "after pooling", [f"{s.kind} ({s.folder})" for s in stages], MODULES)
    trace.decide("architectures", "normalize", normalize, source)
    # Another kind of model's prompts are not for texts alone: the library drops them too where it makes an embedder of
    # a cross-encoder.
    has_prompts = modules.made_for != _RERANKER
    spec = PoolingSpec(
        modes=modes,
        stages=stages,
        normalize=normalize,
        dimensions=given.get("dimensions"),
        include_prompt=modules.include_prompt,
        prompts=modules.prompts if has_prompts else {},
        default_prompt=_default_prompt(modules, trace) if has_prompts else None,
        lower_case=modules.lower_case,
        as_messages=modules.as_messages,
    )
    spec.embedding_size(config.hidden_size, modes or ("one token",))
    return spec


def _classifier(modules: SentenceModules, given: dict[str, Any], config: ModelConfig, trace: Trace) -> PoolingSpec:
    _refuse(given, ("pooling_type", "normalize", "dimensions"), "embeddings")
    if modules.listed and (modules.stages or modules.modes):
        raise ConfigError(
            f"{MODULES} says that this checkpoint embeds, and it was resolved to classify.",
            hint="Pass convert='embed' (--convert embed).",
        )
    labels = num_labels(config)
    declared, source = _declared(modules, config)
    activation, score = declared, declared
    if declared is None:
        problem = config.raw.get("problem_type")
        if problem is not None and problem not in _PROBLEMS:
            raise ConfigError(f"the config has problem_type {problem!r}; known: {', '.join(_PROBLEMS)}.")
        score = "sigmoid" if labels == 1 else "identity"
        activation = _PROBLEMS.get(problem or "", "sigmoid" if labels == 1 else "softmax")
        if activation == "softmax" and labels == 1:
            activation = "sigmoid"  # of one logit, softmax makes 1 whatever it is
        source = config.origins.of(("problem_type",)) if problem else f"derived: {labels} labels"
    if "activation" in given:
        activation = score = given["activation"]
    if given.get("use_activation") is False:
        activation = score = "identity"
    source = trace.argument("pooler_config") if given else source
    assert activation is not None
    assert score is not None
    trace.decide("architectures", "activation", activation, source)
    pad = config.get("pad_token_id")
    # As the library has it: without modules.json none of its other files is read.
    has_prompts = modules.listed and modules.made_for == _RERANKER
    return PoolingSpec(
        activation=activation,
        score_activation=score,
        num_labels=labels,
        pad_token_id=pad if isinstance(pad, int) else None,
        prompts=modules.prompts if has_prompts else {},
        default_prompt=_default_prompt(modules, trace) if has_prompts else None,
        lower_case=modules.lower_case and modules.listed,
        as_messages=modules.as_messages,
    )


def _default_prompt(modules: SentenceModules, trace: Trace) -> str | None:
    name = modules.default_prompt
    if name is not None:
        trace.decide("architectures", "default prompt", f"{name}: {modules.prompts[name]!r}", SENTENCE)
    return name


def _declared(modules: SentenceModules, config: ModelConfig) -> tuple[str | None, str]:
    """The activation that a cross-encoder's files declare, and where."""
    nested = config.raw.get("sentence_transformers")
    found = {
        config.origins.of(("sentence_transformers", "activation_fn")): nested.get("activation_fn")
        if isinstance(nested, Mapping)
        else None,
        config.origins.of((_FORMER_ACTIVATION,)): config.raw.get(_FORMER_ACTIVATION),
        "config_sentence_transformers.json (activation_fn)": modules.activation,
    }
    for where, value in found.items():
        if value is not None:
            name = activation_name(value, where)
            if name not in SCORE_ACTIVATIONS:
                raise ConfigError(f"{where} is {value!r}; of logits are made scores by {', '.join(SCORE_ACTIVATIONS)}.")
            return name, where
    return None, ""


def num_labels(config: ModelConfig) -> int:
    """How many classes a classifier has: ``num_labels``, the names of its labels, or two, as configs leave them out."""
    said = config.raw.get("num_labels")
    if isinstance(said, int) and not isinstance(said, bool) and said > 0:
        return said
    names = config.raw.get("id2label")
    if isinstance(names, Mapping) and names:
        return len(names)
    default = getattr(config.hf, "num_labels", None)
    return default if isinstance(default, int) and default > 0 else 2


def _refuse(given: Mapping[str, Any], names: tuple[str, ...], whose: str) -> None:
    found = [name for name in names if name in given]
    if found:
        raise UsageError(f"pooler_config: {', '.join(found)} would have no effect here; it is for {whose}.")
