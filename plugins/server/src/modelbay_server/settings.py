"""How the server is set: addresses, limits, keys, and which models under which names. No torch, no web framework."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelbay.errors import UsageError

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1024, "MI": 1024**2, "GI": 1024**3}


_LONGEST_TIMEOUT_S = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything about the server but its models. Sizes in bytes, times in seconds.

    Args:
        api_key: what clients must send as ``Authorization: Bearer …``; None lets everybody in.
        allowed_origins: web origins whose pages may call the server; none by default.
        max_concurrent_requests: HTTP requests that run or wait in the engines at once; more are told to come back.
        max_answer_entries: most log-probabilities and token ids of one answer: see `modelbay_server.answers.size`.
        model_memory: most memory of all loaded models together (weights and caches); None for no limit.
        log_requests: one line for each request, without any text of it.
        shutdown_timeout: how long running requests may go on after SIGTERM.
        body_timeout: how long a client may pause while it sends a body.
        tool_call_parser: one of `modelbay_server.tool_forms.PARSERS`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_concurrent_requests: int = 512
    max_request_bytes: int = 8 * 1024**2
    max_answer_entries: int = 2_000_000
    model_memory: int | None = None
    log_requests: bool = False
    shutdown_timeout: float = 60.0
    body_timeout: float = 60.0
    tool_call_parser: str = "auto"

    def __post_init__(self) -> None:
        if not self.host.strip():  # which to a socket means every address of this machine
            raise UsageError("--host must not be empty.", hint="0.0.0.0 listens on every address.")
        if not 0 < self.shutdown_timeout <= _LONGEST_TIMEOUT_S:
            raise UsageError(
                f"--shutdown-timeout must be at most {_LONGEST_TIMEOUT_S:,} seconds, got {self.shutdown_timeout!r}."
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UsageError("TLS needs both --ssl-certfile and --ssl-keyfile.")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise UsageError("the API key must be printable ASCII without spaces, and not empty.")


@dataclass(frozen=True)
class ModelSource:
    """A model to serve: its reference, the names clients use (the first is the one it answers with), its arguments."""

    reference: str
    names: tuple[str, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def model_sources(
    references: Sequence[str], names: Sequence[str], kwargs: Mapping[str, Any]
) -> tuple[ModelSource, ...]:
    """Which model answers to which names. One model may have several names; of several models each has one.

    Raises:
        UsageError: no model, a number of names that fits neither, or a name or model given twice.
    """
    if not references:
        raise UsageError("no model was given.", hint="modelbay serve MODEL, or --model MODEL, several times for more.")
    given = tuple(names) or tuple(references)
    for kind, values in (("model", references), ("--served-model-name", given)):
        twice = sorted({value for value in values if list(values).count(value) > 1})
        if twice:
            raise UsageError(f"{kind} {twice[0]!r} was given twice.")
    if not all(given):
        raise UsageError("--served-model-name must not be empty.")
    if len(references) == 1:
        return (ModelSource(references[0], given, kwargs),)
    if len(given) != len(references):
        raise UsageError(
            f"{len(references)} models were given and {len(given)} times --served-model-name: "
            "give one name for each model, in order."
        )
    return tuple(ModelSource(ref, (name,), kwargs) for ref, name in zip(references, given, strict=True))


def parse_bytes(text: str) -> int:
    """``"8GiB"``, ``"500 MB"`` or ``"1000000"`` as bytes.

    Raises:
        UsageError: not a size above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[KMG]I?)B?", text.strip().upper())
    size = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1 <= size < 2**63:
        raise UsageError(f"{text!r} is not a size.", hint="For example 8GiB, 500MB, or a number of bytes.")
    return int(size)
