"""One exception tree. Every message says what was asked, what was found, and what to do next.

The CLI prints ``error: <message>`` in one line and exits with the class's ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Sequence


class ModelbayError(Exception):
    """Base of everything Modelbay raises on purpose.

    Args:
        message: what was asked and what was found.
        hint: the next step for the person who reads it, if there is one.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} {hint}" if hint else message)


class UsageError(ModelbayError, ValueError):
    """The caller asked for something that makes no sense whatever the model (exit code 2)."""

    exit_code = 2


class PluginError(ModelbayError):
    """A plugin that could not be imported, validated or registered."""


class UnknownNameError(UsageError, PluginError):
    """An argument names something that nobody who is installed offers."""


class PluginConflictError(PluginError):
    """Two plugins own one name and nobody chose between them."""


class SourceError(ModelbayError):
    """The model reference could not be turned into files."""


class ModelNotFoundError(SourceError):
    """No such path, and no such repository in the cache or on the hub (404)."""


class RevisionNotFoundError(SourceError):
    """The repository exists, the revision does not."""


class AuthenticationError(SourceError):
    """The hub asked for a valid token (401)."""


class GatedModelError(SourceError):
    """The token is valid but has not been granted access (403)."""


class OfflineError(SourceError):
    """The network is off or unreachable and the cache does not hold what is needed."""


class NotAModelError(SourceError):
    """The files exist but there is no config.json and no load format that carries one."""


class TrustError(ModelbayError):
    """Code from a model repository would have to run, and it was not allowed to."""


class RemoteCodeError(ModelbayError):
    """Trusted code from a model repository is absent, or failed while it was imported."""


class LockError(ModelbayError):
    """A locked run would differ from what was locked."""


class ConfigError(ModelbayError):
    """The config is unreadable, contradictory, or says something Modelbay does not know."""


class TokenizerError(ModelbayError):
    """The tokenizer could not be loaded or used as asked."""


class ArchitectureError(ModelbayError):
    """No installed plugin serves this architecture in the way that was asked."""


class BackendError(ModelbayError):
    """No modelling backend accepts the model."""


class WeightsError(ModelbayError):
    """The checkpoint is incomplete, damaged, or does not fit the module."""


class EngineError(ModelbayError):
    """A running engine met a state it must not go on from (NaN logits, a dead worker, no memory).

    Args:
        request_ids: the requests that it is about, whose end lets the others go on; none where it is about the engine.
    """

    def __init__(self, message: str, *, hint: str | None = None, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.request_ids = tuple(request_ids)


def one_line(error: BaseException) -> str:
    """What an exception of other people's code says, on one line and without a final full stop; its type's name where
    it says nothing."""
    return _said(error) or type(error).__name__


def one_line_with_type(error: BaseException) -> str:
    """The same after the name of its type: ``KeyError: 'weight'``."""
    text = _said(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _said(error: BaseException) -> str:
    try:
        return " ".join(str(error).split()).rstrip(".")
    except Exception:  # its own __str__ fails
        return ""
