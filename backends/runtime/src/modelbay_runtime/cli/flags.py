"""Parameters that the flags of a command make: what is wrong with them for every text is told of the flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import PoolingParams

#: Flag -> the parameter that it sets, and its value; None: it was not given.
Flags = Mapping[str, tuple[str, Any]]


def params_of(flags: Flags, check: Callable[[PoolingParams], object] = lambda params: None) -> PoolingParams:
    """The parameters, each flag's checked beside those before it.

    Args:
        check: raises `UsageError` for parameters that the model refuses of every text.

    Raises:
        UsageError: naming the flag; or what ``check`` raises of no parameters at all.
    """
    check(PoolingParams())
    values: dict[str, Any] = {}
    for flag, (name, value) in flags.items():
        if value is None:
            continue
        values[name] = value
        at_flag(flag, lambda: check(PoolingParams(**values)))
    return PoolingParams(**values)


def check_one_prompt(prompt: str | None, prompt_name: str | None) -> None:
    """Raises:
    UsageError: a text to put before others was given, and the name of one too.
    """
    if prompt is not None and prompt_name is not None:
        raise UsageError("--prompt and --prompt-name were both given; give one.")


def at_flag(flag: str, run: Callable[[], object]) -> None:
    """``run()``; an error names the flag that it is about.

    Raises:
        UsageError: as ``run`` raised it.
    """
    try:
        run()
    except UsageError as error:
        raise UsageError(f"{flag}: {error.message}", hint=error.hint) from error
