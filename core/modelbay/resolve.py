"""The hallway from a reference to a Resolution: what will run, decided without weights and without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelbay.args import EngineArgs
from modelbay.backends import Candidate
from modelbay.trace import Trace

if TYPE_CHECKING:
    from modelbay.config import ModelConfig
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.specs import ArchSpec, Owner


@dataclass(frozen=True, slots=True)
class Resolution:
    """What will run: the files at their commit, the facts, the architecture and its owner, the backend that builds it.

    ``task`` is "generate", "embed", "classify" or "score". ``arch`` is None when only a backend without native
    architectures (transformers) serves the model.
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


def resolve(model: str, **kwargs: Any) -> Resolution:
    """Resolve a model; the keyword arguments are those of `modelbay.LLM`. Loads no weights, starts no engine."""
    raise NotImplementedError
