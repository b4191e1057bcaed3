"""The one gate for other people's code: only this module may import Python files from a model repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace


def load_remote_class(
    reference: str, files: ModelFiles, *, trusted: bool, code_revision: str | None, what: str, trace: Trace
) -> Any:
    """Import the class that an ``auto_map`` entry names (``"module.Class"`` or ``"org/code--module.Class"``).

    Raises:
        TrustError: not trusted; names the repository, the class, and the flag. Raised before anything is imported.
    """
    raise NotImplementedError
