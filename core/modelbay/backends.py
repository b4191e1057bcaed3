"""Modelling backends: who builds the module. Each gives a verdict, one builds, the others' reasons are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.plugins import Owned, Plugins
    from modelbay.resolve import Resolution
    from modelbay.source import ModelFiles
    from modelbay.specs import ArchSpec, AttentionKindSpec, BackendSpec, KernelSpec, LoadFormatSpec


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a backend says of a model: whether it can build it, and why (not)."""

    ok: bool
    reason: str
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that was asked, with its verdict, and the backend that it extends."""

    backend: str
    verdict: Verdict
    extends: str | None = None

    def answers_to(self, wanted: str) -> bool:
        """Whether this value of ``model_impl`` asks for it."""
        return wanted in ("auto", self.backend, self.extends)


class ModelingBackend(Protocol):
    """What a `BackendSpec.target` must be: a class without constructor arguments.

    ``assess`` must not import torch where it can avoid it: it runs in ``explain --no-build``.
    """

    def assess(
        self, files: ModelFiles, config: ModelConfig, arch: ArchSpec | None, args: EngineArgs, plugins: Plugins
    ) -> Verdict:
        """Whether this backend can build the model. Never raises for a model it cannot serve."""

    def build(self, resolution: Resolution, build: Any) -> Any:
        """The module, its parameters on ``build.device`` (meta when explaining); ``build`` is a
        `modelbay_runtime.api.BuildContext`. Every decision goes to ``resolution.trace``."""

    # A backend may offer ``supported() -> list[ArchSpec]``: the architectures that it serves without a plugin that
    # registers them, for ``list-archs --all``; it reads data and imports no model code.

    # A backend may offer ``media_processor(resolution, tokenizer)`` for models that take images or audio: a
    # `modelbay_runtime.multimodal.data.MediaProcessor`, or None.

    def dry_run(self, resolution: Resolution) -> None:
        """Walk build, plan and kernels on the meta device, for ``explain``: same functions, no weights."""


@dataclass(frozen=True, slots=True)
class InstalledBackends:
    """What is installed to run models with, each with its owner, by name.

    ``kernel_sets`` maps a set ("torch", "triton") to its kernels.
    """

    modeling: tuple[Owned[BackendSpec], ...]
    kernel_sets: Mapping[str, tuple[Owned[KernelSpec], ...]]
    attention_kinds: tuple[Owned[AttentionKindSpec], ...]
    load_formats: tuple[Owned[LoadFormatSpec], ...]


def backends(plugins: Plugins | None = None) -> InstalledBackends:
    """The modelling backends, kernel sets, attention kinds and load formats that the installed plugins register."""
    if plugins is None:
        from modelbay.plugins import load_plugins

        plugins = load_plugins()
    kernels: dict[str, list[Owned[KernelSpec]]] = {}
    for owned in plugins.all("kernels"):
        kernels.setdefault(owned.value.set, []).append(owned)
    return InstalledBackends(
        modeling=tuple(sorted(plugins.all("modeling_backends"), key=lambda o: (o.value.order, o.value.name))),
        kernel_sets={name: tuple(kernels[name]) for name in sorted(kernels)},
        attention_kinds=tuple(plugins.all("attention_kinds")),
        load_formats=tuple(plugins.all("load_formats")),
    )
