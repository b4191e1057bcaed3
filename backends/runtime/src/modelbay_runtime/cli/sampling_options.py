"""Sampling parameters as flags, for the commands that generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import SamplingParams, StructuredOutputs

F = TypeVar("F", bound=Callable[..., Any])

#: Output tokens where neither the command line nor the model says how many.
DEFAULT_MAX_TOKENS = 256

_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, f"Most tokens of output. [default: the model's, else {DEFAULT_MAX_TOKENS}]"),
    ("min_tokens", int, "Tokens before which nothing ends the output."),
    ("temperature", float, "0 takes the likeliest token. [default: the model's, else 1]"),
    ("top_p", float, "Sample from the likeliest tokens with this probability in sum."),
    ("top_k", int, "Sample from this many likeliest tokens; 0 means all."),
    ("min_p", float, "Leave out tokens below this share of the likeliest one's probability."),
    ("repetition_penalty", float, "Above 1: make tokens of prompt and output less likely."),
    ("presence_penalty", float, "Lower tokens that are in the output."),
    ("frequency_penalty", float, "Lower tokens by how often they are in the output."),
)

_STRUCTURED_OPTIONS: tuple[tuple[str, bool, str], ...] = (
    ("--json-schema", False, "The output is JSON of this schema: a file, or the schema itself."),
    ("--regex", False, "The output matches this regular expression as a whole."),
    ("--choice", True, "The output is this text, or another one given so."),
)


def sampling_options(command: F) -> F:
    """Decorate a click command with the sampling parameters; one that is not given arrives as None."""
    for name, kind, help_text in reversed(_OPTIONS):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=help_text)(command)
    for flag, many, help_text in reversed(_STRUCTURED_OPTIONS):
        command = click.option(flag, multiple=many, default=None, help=help_text)(command)
    command = click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")(command)
    return click.option("--stop", multiple=True, help="A text that ends the output; may be given several times.")(
        command
    )


def sampling_params_from(options: Mapping[str, Any], generation: Mapping[str, Any], **more: Any) -> SamplingParams:
    """`SamplingParams` from a command's options; the model's own defaults fill what was not given."""
    given = {name: options[name] for name, _, _ in _OPTIONS if options.get(name) is not None}
    if "max_tokens" not in given and generation.get("max_new_tokens") is None:
        given["max_tokens"] = max(DEFAULT_MAX_TOKENS, given.get("min_tokens", 0))
    if options.get("stop"):
        given["stop"] = list(options["stop"])
    if options.get("ignore_eos"):
        given["ignore_eos"] = True
    return SamplingParams(**given, structured_outputs=_structured_outputs(options), **more)


def _structured_outputs(options: Mapping[str, Any]) -> StructuredOutputs | None:
    given: dict[str, Any] = {}
    if options.get("regex") is not None:
        given["regex"] = options["regex"]
    if options.get("json_schema") is not None:
        given["json"] = _read_schema(options["json_schema"])
    if options.get("choice"):
        given["choice"] = list(options["choice"])
    return StructuredOutputs(**given) if given else None


def _read_schema(value: str) -> str:
    if value.lstrip().startswith("{"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(
            f"--json-schema {value!r} is neither a JSON object nor a file that can be read: {error}."
        ) from error
