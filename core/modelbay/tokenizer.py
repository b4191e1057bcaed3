"""Tokenizers: modes, the cached wrapper, chat templates (BEHAVIOUR T1-T5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace


def load_tokenizer(files: ModelFiles, config: ModelConfig, plugins: Plugins, args: EngineArgs, trace: Trace) -> Any:
    """The tokenizer as Transformers returns it, its expensive attributes cached, safe to use from many threads."""
    raise NotImplementedError
