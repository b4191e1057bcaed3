"""From the names in a config to one `ArchSpec` and its owner; the list of what is installed (BEHAVIOUR A1, A2, C3)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from modelbay.errors import ArchitectureError, UsageError
from modelbay.registry import Owned, Plugins
from modelbay.specs import CONTRACT_VERSION, ArchSpec, Owner, load_target
from modelbay.trace import Rejected, Trace

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig

#: What the end of a class name says about its head, longest ending first where one contains another.
_SUFFIX_TASKS = (
    ("ForCausalLM", "generate"),
    ("ForConditionalGeneration", "generate"),
    ("LMHeadModel", "generate"),
    ("ForSequenceClassification", "classify"),
    ("ForRewardModel", "classify"),
    ("RewardModel", "classify"),
    ("ForTextEncoding", "embed"),
    ("EmbeddingModel", "embed"),
    ("Model", "embed"),
)

#: Endings of the classes whose body can serve a pooling task (A1), in the order in which they are looked for.
_CONVERTIBLE = ("ForCausalLM", "LMHeadModel", "Model")

#: Attention kinds that every runtime has; others must be registered by some plugin.
_COMMON_ATTENTION = ("full", "sliding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ArchSpec):
    """An installed `ArchSpec`, with its owner."""

    owner: Owner

    def to_dict(self) -> dict[str, Any]:
        """What ``list-archs --json`` shows."""
        return {
            "name": self.name,
            "tasks": list(self.tasks),
            "modalities": list(self.modalities),
            "owner": self.owner.distribution,
            "version": self.owner.version,
            "model_types": list(self.model_types),
            "parallel": list(self.parallel),
            "attention": list(self.attention),
            "examples": list(self.examples),
        }


def architectures(plugins: Plugins | None = None) -> list[Architecture]:
    """Every architecture that the installed plugins register, by name then owner; imports no model code."""
    if plugins is None:
        from modelbay.plugins import load_plugins

        plugins = load_plugins()
    return [_with_owner(owned) for owned in plugins.all("architectures")]


def architectures_of_backends(plugins: Plugins) -> list[Architecture]:
    """Those that no plugin registers and a modelling backend serves all the same, by what it says of itself; without
    model code."""
    registered = {owned.value.name for owned in plugins.all("architectures")}
    found = []
    for owned in plugins.all("modeling_backends"):
        backend = load_target(owned.value.target)()
        specs = backend.supported() if hasattr(backend, "supported") else []
        found += [_with_owner(Owned(spec, owned.owner)) for spec in specs if spec.name not in registered]
    return sorted(found, key=lambda arch: (arch.name, arch.owner.distribution))


def select_architecture(
    config: ModelConfig, plugins: Plugins, args: EngineArgs, trace: Trace
) -> tuple[str, str, Owned[ArchSpec] | None]:
    """Choose the task and the architecture.

    Returns:
        The task, the architecture's name (of ``config.architectures``, which the config stage has filled), and the
        record that serves it, which has another name after a suffix conversion; None if no plugin registers one.

    Raises:
        ArchitectureError: the architecture cannot do what was asked, or it was written for another version of the
            model contract.
        PluginConflictError: two distributions register it.
    """
    name, owned = _registered(config.architectures, plugins, args)
    rejected = _other_names(config.architectures, name) + _other_owners(name, owned, plugins)
    if owned is not None:
        owned, unfit = _fit(owned, plugins, args)
        rejected += unfit
    answer = name if owned is None or owned.value.name == name else f"{name}, served by {owned.value.name}"
    by = f"registered by {owned.owner}" if owned else "no plugin registers it"
    source = config.sources.get("architectures", "the config")
    trace.decide("architectures", "architecture", answer, f"{source}; {by}", rejected=tuple(rejected))
    task = _decide_task(name, owned, args, trace)
    return task, name, owned


def suffix_task(name: str) -> str | None:
    """The task that the end of a class name tells, None if it tells none that is known."""
    split = _split(name)
    return split[2] if split else None


def _registered(names: tuple[str, ...], plugins: Plugins, args: EngineArgs) -> tuple[str, Owned[ArchSpec] | None]:
    """The first name that a plugin registers; else the first whose relative can serve it with another head."""
    for name in names:
        owned = plugins.get("architectures", name)
        if owned is not None:
            return name, owned
    for name in names if args.convert != "none" else ():
        for relative in _relatives(name, args):
            owned = plugins.get("architectures", relative)
            if owned is not None:
                return name, owned
    return names[0], None


def _relatives(name: str, args: EngineArgs) -> list[str]:
    """Classes with the same body: ``LlamaForSequenceClassification`` -> ``LlamaForCausalLM``, ``LlamaModel`` …

    Only for pooling: another class that generates is another model.
    """
    split = _split(name)
    if split is None:
        return []
    stem, own_suffix, task = split
    pooling = task != "generate" or (own_suffix in _CONVERTIBLE and _wants_pooling(args))
    return [stem + suffix for suffix in _CONVERTIBLE if suffix != own_suffix] if pooling else []


def _split(name: str) -> tuple[str, str, str] | None:
    """Stem, suffix, task."""
    for suffix, task in _SUFFIX_TASKS:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix), suffix, task
    return None


def _fit(owned: Owned[ArchSpec], plugins: Plugins, args: EngineArgs) -> tuple[Owned[ArchSpec] | None, list[Rejected]]:
    """Refuse a record that this core cannot use, unless another backend than native was asked for."""
    problem = _contract_problem(owned) or _attention_problem(owned, plugins)
    if problem is None:
        return owned, []
    if args.model_impl not in ("auto", "native"):
        return None, [Rejected(owned.value.name, " ".join(problem))]
    raise ArchitectureError(problem[0], hint=problem[1])


def _contract_problem(owned: Owned[ArchSpec]) -> tuple[str, str] | None:
    low, high = owned.value.contract
    if low <= CONTRACT_VERSION <= high:
        return None
    written = f"{low}" if low == high else f"{low} to {high}"
    message = (
        f"{owned.value.name} of {owned.owner} was written for version {written} of the model contract; "
        f"this Modelbay speaks version {CONTRACT_VERSION}."
    )
    older, newer = owned.owner.distribution, "modelbay"
    if low > CONTRACT_VERSION:
        older, newer = newer, older
    return message, f"Upgrade {older}, or install an older {newer}."


def _attention_problem(owned: Owned[ArchSpec], plugins: Plugins) -> tuple[str, str] | None:
    for kind in owned.value.attention:
        if kind not in _COMMON_ATTENTION and plugins.get("attention_kinds", kind) is None:
            message = f"{owned.value.name} of {owned.owner} needs the attention kind {kind!r}, which no plugin offers."
            return message, plugins.absent_hint("attention_kinds", kind)
    return None


def _decide_task(name: str, owned: Owned[ArchSpec] | None, args: EngineArgs, trace: Trace) -> str:
    """The task; where the class was not written for it, the conversion that serves it (A1)."""
    own_tasks: tuple[str, ...] = (suffix_task(name) or "generate",)
    if owned is not None and owned.value.name == name:
        own_tasks = owned.value.tasks
    task, source = _task(name, own_tasks, args, trace)
    serving, tasks = (owned.value.name, owned.value.tasks) if owned else (name, own_tasks)
    conversion = "none"
    if task not in tasks:
        split = _split(serving)
        if owned is not None and (split is None or split[1] not in _CONVERTIBLE):
            raise _cannot(serving, tasks, task)
        conversion = f"{serving} -> {task}"
    trace.decide("architectures", "task", task, source)
    trace.decide("architectures", "conversion", conversion, source)
    return task


def _wants_pooling(args: EngineArgs) -> bool:
    return args.runner == "pooling" or args.convert in ("embed", "classify")


def _task(name: str, own_tasks: tuple[str, ...], args: EngineArgs, trace: Trace) -> tuple[str, str]:
    """The task and what decided it: ``convert``, then ``runner``, then what the architecture is for."""
    pooling = [task for task in own_tasks if task != "generate"]
    if args.convert in ("embed", "classify"):
        if args.runner == "generate":
            raise UsageError(f"convert={args.convert} makes a pooling model; it contradicts runner=generate.")
        return args.convert, _asked(trace, "convert", args.convert)
    if args.runner == "generate":
        if "generate" not in own_tasks:
            raise _cannot(name, own_tasks, "generate")
        return "generate", _asked(trace, "runner", args.runner)
    if args.runner == "pooling":
        if not pooling and args.convert == "none":
            raise _cannot(name, own_tasks, "pooling without a conversion")
        return (pooling or ["embed"])[0], _asked(trace, "runner", args.runner)
    return own_tasks[0], f"tasks of {name}"


def _asked(trace: Trace, argument: str, value: str) -> str:
    """``argument runner=pooling``, or who filled the argument in."""
    source, given = trace.argument(argument), f"argument {argument}"
    return f"{given}={value}" if source == given else source


def _cannot(name: str, tasks: tuple[str, ...], asked: str) -> ArchitectureError:
    return ArchitectureError(
        f"{name} serves {', '.join(tasks)}, but {asked} was asked for.",
        hint='If the checkpoint has that head, name its class: --hf-overrides \'{"architectures": ["…"]}\'.',
    )


def _other_names(names: tuple[str, ...], chosen: str) -> list[Rejected]:
    return [Rejected(name, f"{chosen} was chosen") for name in names if name != chosen]


def _other_owners(name: str, owned: Owned[ArchSpec] | None, plugins: Plugins) -> list[Rejected]:
    """The owners that a preference passed over."""
    if owned is None:
        return []
    preference = plugins.preference(owned.value.name)
    reason = f"{preference.distribution} is preferred ({preference.source})" if preference else ""
    owners = plugins.owners("architectures", owned.value.name)
    return [Rejected(f"{other.value.name} of {other.owner}", reason) for other in owners if other != owned]


def _with_owner(owned: Owned[ArchSpec]) -> Architecture:
    values = {entry.name: getattr(owned.value, entry.name) for entry in fields(ArchSpec)}
    return Architecture(**values, owner=owned.owner)
