"""What plugins register: frozen, declarative records. Code is named as ``"package.module:object"`` and imported late.

Nothing here imports torch, and nothing here knows a model family.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelbay.errors import PluginError

if TYPE_CHECKING:
    from modelbay.weights.transforms import Transform

#: The version of the model contract (`modelbay_runtime.api`) that this core speaks.
CONTRACT_VERSION = 1

TASKS = ("generate", "embed", "classify", "score")


def load_target(target: str) -> Any:
    """Import ``"package.module:object"`` (dotted attributes allowed after the colon).

    Raises:
        PluginError: naming the target and the original exception's type and message.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise PluginError(f'target {target!r} is not of the form "package.module:object".')
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:
        raise PluginError(f"cannot import {target!r}: {type(error).__name__}: {error}") from error
    return value


@dataclass(frozen=True, slots=True)
class Owner:
    """Who registered something: the distribution, its version, and the entry point (or module) name."""

    distribution: str
    version: str
    plugin: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """One architecture as named in a config's ``architectures``.

    Args:
        name: the exact name, e.g. ``"LlamaForCausalLM"``.
        target: the class that follows the model contract, imported only when a model is built.
        model_types: the ``model_type`` values this architecture is used with.
        tasks: of `TASKS`.
        modalities: ``"text"``, ``"image"``, ``"audio"``.
        attention: the attention kinds its layers use (``"full"``, ``"sliding"``, or one that a plugin registers).
        parallel: what it was written for: ``"tp"``, ``"pp"``, ``"ep"``, ``"dp"``.
        tp_plan, pp_plan: plans in the Transformers format, keyed by logical names as in the checkpoint.
        transforms: the checkpoint's names and shapes to the model's, as data.
        examples: well-known hub ids.
        contract: the range ``(lowest, highest)`` of model contract versions it was written for.
    """

    name: str
    target: str
    model_types: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("generate",)
    modalities: tuple[str, ...] = ("text",)
    attention: tuple[str, ...] = ("full",)
    parallel: tuple[str, ...] = ()
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    pp_plan: Mapping[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    transforms: tuple[Transform, ...] = ()
    examples: tuple[str, ...] = ()
    contract: tuple[int, int] = (CONTRACT_VERSION, CONTRACT_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClassSpec:
    """A config class for one ``model_type``. The class is called with the raw dict's items as keyword arguments,
    and may carry ``aliases``: ``{canonical key: (other names, …)}`` for keys beyond the common ones."""

    model_type: str
    target: str
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPatch:
    """A historical patch, named, applied to the config dict of the model types it lists (empty: every one).

    ``target`` is ``fn(config: dict) -> str | None``: it mutates the dict and returns what it did, or None.
    """

    name: str
    target: str
    model_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerModeSpec:
    """A tokenizer mode. ``target`` is ``fn(files, config, args, trace) -> PreTrainedTokenizerBase``."""

    name: str
    target: str
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConfig:
    """What config.json would have said, read out of a checkpoint's own file.

    ``sources``: config key (``"rope_parameters.rope_theta"``) -> the key of the file that says it, or how else it is
    known (``"derived: …"``). An object's entry counts for all that is in it. `modelbay explain` shows them.
    """

    values: dict[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFormatSpec:
    """A checkpoint format.

    Args:
        name: the value of ``load_format``.
        target: a class that follows `modelbay.weights.formats.LoadFormat`.
        suffixes: file endings this format reads (``".safetensors"``).
        auto: position among the formats that ``load_format="auto"`` tries, lowest first; None: only by name.
        config: ``fn(path) -> dict`` that reads a config out of the checkpoint itself when there is no config.json; or
            ``-> StoredConfig``, which says as well under which keys of the file its values stand.
        tokenizer_mode: the tokenizer mode that reads the tokenizer out of the checkpoint, for such formats.
        transforms: ``fn(config) -> tuple[Transform, ...]``: this format's own names to Hugging Face's, applied
            before the architecture's transforms.
    """

    name: str
    target: str
    suffixes: tuple[str, ...] = ()
    auto: int | None = None
    config: str | None = None
    tokenizer_mode: str | None = None
    transforms: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A modelling backend: a class that follows `modelbay.backends.ModelingBackend`, lowest ``order`` tried first.

    ``extends`` names a backend whose ``model_impl`` asks for this one too, after it: "auto_map" extends "transformers"
    by models that a repository brings itself.
    """

    name: str
    target: str
    order: int = 100
    summary: str = ""
    extends: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKindSpec:
    """A kind of attention. ``target`` is its torch reference, with the signature documented in
    `modelbay_runtime.kernels.ops`; ``kv`` names the KVSpec class of its cache."""

    name: str
    target: str
    kv: str
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One implementation of one op.

    Args:
        set: the kernel set it belongs to (``"torch"``, ``"triton"``), what ``kernels=`` and
            ``attention_backend=`` name.
        op: the op (``"rms_norm"``, ``"attention.full"``).
        target: the callable, with the op's signature.
        devices: device types it runs on (``"cuda"``, ``"cpu"``).
        dtypes: dtype names it takes; empty means any.
        constraint: ``fn(facts: Mapping) -> str | None``: None if it can serve a layer with these facts
            (head_size, window, softcap, sinks …), else the reason.
        available: ``fn() -> str | None``: None if it can run on this machine, else the reason.
        priority: the highest among those that fit wins; the torch reference has 0.
    """

    set: str
    op: str
    target: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    constraint: str | None = None
    available: str | None = None
    priority: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """A ``quant_method`` somebody can serve. ``summary`` says how (``"dequantised while streaming"``).

    ``target`` is ``fn(config: ModelConfig) -> tuple[Transform, ...]``, applied to the names on disk before all other
    transforms of an architecture; it raises ConfigError for settings of the method that it does not serve. None: the
    load format alone reads it.

    ``kept`` is ``fn(config: ModelConfig) -> BlockScales`` (`modelbay.weights.fp8`): how layers hold such weights that
    are not dequantised at load. None: they always are.
    """

    method: str
    summary: str
    target: str | None = None
    kept: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A subcommand. ``target`` is a click command, imported only when it runs or its own help is shown."""

    name: str
    target: str
    summary: str
