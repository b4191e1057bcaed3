"""The hallway from a reference to a Resolution: what will run, decided without weights and without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelbay.architectures import select_architecture
from modelbay.args import EngineArgs
from modelbay.backends import Candidate, Verdict
from modelbay.errors import ArchitectureError, BackendError, ConfigError, PluginError, UsageError
from modelbay.pooling import MODULES, PoolingSpec, pooling_module, resolve_pooling
from modelbay.settings import Settings, load_settings
from modelbay.specs import load_target
from modelbay.trace import Rejected, Trace

if TYPE_CHECKING:
    from modelbay.config import ModelConfig
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.specs import ArchSpec, BackendSpec, Owner
    from modelbay.weights.transforms import Transform


@dataclass(frozen=True, slots=True)
class Resolution:
    """What will run: the files at their commit, the facts, the architecture and its owner, the backend that builds it.

    ``task`` is "generate", "embed", "classify" or "score". ``architecture`` is the name in the config; ``arch`` is the
    record that serves it (of another name after a conversion), None when only a backend without native architectures
    (transformers) serves the model. ``candidates``: every backend that was asked, in order.
    ``pooling``: what becomes of hidden states; None for a model that generates.
    """

    args: EngineArgs
    plugins: Plugins
    files: ModelFiles
    config: ModelConfig
    task: str
    architecture: str
    arch: ArchSpec | None
    owner: Owner | None
    backend: str
    candidates: tuple[Candidate, ...]
    trace: Trace
    pooling: PoolingSpec | None = None


def resolve(model: str, **kwargs: Any) -> Resolution:
    """Resolve a model; the keyword arguments are those of `modelbay.LLM`. Loads no weights, starts no engine.

    Raises:
        UsageError: an argument makes no sense.
        ModelbayError: the stage that could not go on, see `modelbay.errors`.
    """
    settings, trace = load_settings(), Trace()
    return resolve_args(engine_args(model, kwargs, settings, trace), trace=trace, settings=settings)


def engine_args(model: str, kwargs: Mapping[str, Any], settings: Settings, trace: Trace) -> EngineArgs:
    """The arguments as given, over those of the config file; the trace says which came from there."""
    given = {name for name, value in kwargs.items() if value is not None}
    for name in sorted(settings.args.keys() - given):
        trace.decide("plugins", f"argument {name}", settings.args[name], f"[args] {name} in {settings.path}")
    return EngineArgs.create(model, **settings.with_defaults(kwargs))


def resolve_args(
    args: EngineArgs,
    *,
    trace: Trace | None = None,
    plugins: Plugins | None = None,
    settings: Settings | None = None,
) -> Resolution:
    """`resolve` for arguments that are complete. A ``trace`` given here holds what was decided before a failure."""
    from modelbay.config import load_config
    from modelbay.plugins import load_plugins
    from modelbay.source import find_files

    trace = Trace() if trace is None else trace
    settings = load_settings() if settings is None else settings
    lock = None
    if args.locked is not None:
        from modelbay.lock import read_lock

        lock = read_lock(args.locked)
        args = lock.pin(args, trace)
    if plugins is None:
        plugins = load_plugins(
            args.plugins, prefer=args.prefer, strict=args.strict_plugins, trace=trace, settings=settings
        )
    files = find_files(args.model, revision=args.revision, file_suffixes=single_file_suffixes(plugins), trace=trace)
    config = load_config(files, plugins, args, trace)
    check_quantization(config, args, plugins, trace)
    task, architecture, owned = select_architecture(config, plugins, made_for(files, args, trace), trace)
    pooling = resolve_pooling(files, config, task, args, trace)
    arch = owned.value if owned else None
    wanted, source = wanted_backend(args, architecture, settings, trace)
    candidates = assess_backends(files, config, arch, args, plugins, chosen=wanted)
    backend = choose_backend(candidates, wanted, source, config, architecture, arch, plugins, trace)
    owner = owned.owner if owned else None
    resolution = Resolution(
        args, plugins, files, config, task, architecture, arch, owner, backend, candidates, trace, pooling
    )
    if lock is not None:
        lock.check(resolution)
    return resolution


def made_for(files: ModelFiles, args: EngineArgs, trace: Trace) -> EngineArgs:
    """The arguments with ``runner`` filled in where nobody says what for, and the checkpoint was made to embed."""
    said = pooling_module(files)
    if args.runner != "auto" or args.convert != "auto" or said is None:
        return args
    trace.decide("architectures", "argument runner", "pooling", f"{MODULES} ({said})")
    trace.decide("architectures", "argument convert", "embed", f"{MODULES} ({said})")
    return args.replace(runner="pooling", convert="embed")


def single_file_suffixes(plugins: Plugins) -> Sequence[str]:
    """Endings of checkpoints that carry their own config, so that a reference may be that one file."""
    formats = [owned.value for owned in plugins.all("load_formats")]
    return tuple(dict.fromkeys(suffix for spec in formats if spec.config for suffix in spec.suffixes))


def check_quantization(config: ModelConfig, args: EngineArgs, plugins: Plugins, trace: Trace) -> None:
    """C11: refuse a ``quant_method`` that no plugin offers, and an argument that contradicts the checkpoint.

    Raises:
        ConfigError: naming the method and what is installed.
        UsageError: ``quantization`` differs from what the checkpoint says, or it says none.
    """
    said = config.quantization.get("quant_method") if config.quantization else None
    if config.quantization and not isinstance(said, str):
        keys = ", ".join(sorted(map(str, config.quantization)))
        raise ConfigError(
            f"quantization_config has no quant_method (its keys: {keys}), so it is not known how to read the weights.",
            hint='Name the method: --hf-overrides \'{"quantization_config": {"quant_method": "…"}}\'.',
        )
    if said and args.quantization and args.quantization != said:
        raise UsageError(f"quantization={args.quantization!r}, but the checkpoint is quantised with {said!r}.")
    if args.quantization and not said:
        plugins.named("quantizations", args.quantization, "quantization method")
        raise UsageError(
            f"quantization={args.quantization!r}, but the checkpoint is not quantised: its config has no "
            f"quantization_config, and its dtype is {config.checkpoint_dtype or 'not said'}.",
            hint="A method only reads what is quantised already. Leave it out.",
        )
    if said is None:
        return
    owned = plugins.get("quantizations", said)
    if owned is None:
        installed = ", ".join(plugins.names("quantizations")) or "none"
        raise ConfigError(
            f"quantization_config.quant_method is {said!r}, which no installed plugin offers (installed: {installed}).",
            hint=plugins.absent_hint("quantizations", said),
        )
    source = config.sources.get("quantization", "the config")
    trace.decide(
        "config", "quantization method", f"{said} ({owned.value.summary})", f"{source}; served by {owned.owner}"
    )
    quantization_transforms(config, plugins)


def quantization_transforms(config: ModelConfig, plugins: Plugins) -> tuple[Transform, ...]:
    """What brings the checkpoint's quantised tensors to plain ones, by whoever offers the method.

    Raises:
        ConfigError: the method is offered, but not with what quantization_config says.
    """
    method = config.quantization.get("quant_method") if config.quantization else None
    owned = plugins.get("quantizations", method) if isinstance(method, str) else None
    if owned is None or owned.value.target is None:
        return ()
    return tuple(load_target(owned.value.target)(config))


def wanted_backend(args: EngineArgs, architecture: str, settings: Settings, trace: Trace) -> tuple[str, str]:
    """``model_impl`` and its source: the argument, else the config file's choice for this architecture, else auto."""
    if args.model_impl != "auto":
        return args.model_impl, trace.argument("model_impl")
    if architecture in settings.model_impl:
        return settings.model_impl[architecture], f"[model_impl] in {settings.path}"
    return "auto", "default"


def assess_backends(
    files: ModelFiles, config: ModelConfig, arch: ArchSpec | None, args: EngineArgs, plugins: Plugins, *, chosen: str
) -> tuple[Candidate, ...]:
    """Every backend's verdict, lowest ``order`` first.

    A backend that breaks while it is asked says no, with its exception as the reason; the ``chosen`` one raises.

    Raises:
        UsageError: ``chosen`` is not installed.
    """
    names = plugins.names("modeling_backends")
    if chosen != "auto" and chosen not in names:
        installed = ", ".join(["auto", *names])
        hint = plugins.absent_hint("modeling_backends", chosen)
        raise UsageError(f"unknown model_impl {chosen!r}; installed: {installed}.", hint=hint)
    specs = [owned.value for owned in filter(None, (plugins.get("modeling_backends", name) for name in names))]
    candidates = []
    for spec in sorted(specs, key=lambda spec: (spec.order, spec.name)):
        try:
            verdict = _assess(spec, files, config, arch, args, plugins)
        except Exception as error:
            if spec.name == chosen:
                raise
            text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            verdict = Verdict(False, f"it failed: {' '.join(text.split())}")
        candidates.append(Candidate(spec.name, verdict, spec.extends))
    return tuple(candidates)


def _assess(
    spec: BackendSpec, files: ModelFiles, config: ModelConfig, arch: ArchSpec | None, args: EngineArgs, plugins: Plugins
) -> Verdict:
    return load_target(spec.target)().assess(files, config, arch, args, plugins)


def choose_backend(
    candidates: tuple[Candidate, ...],
    wanted: str,
    source: str,
    config: ModelConfig,
    architecture: str,
    arch: ArchSpec | None,
    plugins: Plugins,
    trace: Trace,
) -> str:
    """A1: ``auto`` takes the first that can; a named one never falls back, but to those that extend it.

    Raises:
        ArchitectureError, BackendError: nobody can; the message has every candidate's reason.
    """
    asked = [candidate for candidate in candidates if candidate.answers_to(wanted)]
    chosen = next((candidate for candidate in asked if candidate.verdict.ok), None)
    if chosen is None:
        raise _nobody(asked, wanted, config, architecture, arch, plugins)
    rejected = tuple(
        Rejected(other.backend, _why_not(other, chosen, wanted)) for other in candidates if other != chosen
    )
    trace.decide("backends", "backend", chosen.backend, f"model_impl={wanted} ({source})", rejected=rejected)
    trace.decide("backends", "why", chosen.verdict.reason, chosen.backend)
    return chosen.backend


def _why_not(other: Candidate, chosen: Candidate, wanted: str) -> str:
    if not other.verdict.ok:
        return other.verdict.reason
    why = "comes first" if other.answers_to(wanted) else "was asked for"
    return f"it could ({other.verdict.reason}), but {chosen.backend} {why}"


def _nobody(
    asked: Sequence[Candidate],
    wanted: str,
    config: ModelConfig,
    architecture: str,
    arch: ArchSpec | None,
    plugins: Plugins,
) -> ArchitectureError | BackendError:
    subject = f"{architecture!r} (model_type {config.model_type!r})"
    if not asked:
        hint = plugins.absent_hint("modeling_backends", "native")
        return BackendError(f"no modelling backend is installed that could build {subject}.", hint=hint)
    reasons = "; ".join(f"{candidate.backend}: {candidate.verdict.reason.rstrip('.')}" for candidate in asked)
    scope = "no modelling backend can" if wanted == "auto" else f"model_impl={wanted} cannot"
    message = f"{scope} build {subject}: {reasons}."
    if arch is None:
        return ArchitectureError(message, hint=plugins.absent_hint("architectures", architecture))
    return BackendError(message)
