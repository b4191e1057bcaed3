"""Every engine argument as a flag with dashes, for the commands that take a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from modelbay.args import EngineArgs
from modelbay.cli.group import global_options

F = TypeVar("F", bound=Callable[..., Any])


class JsonObject(click.ParamType):
    """A JSON object as the value of an option."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            self.fail(f"not JSON: {error}.", param, ctx)
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets without end
            self.fail(f"not JSON that can be read: {error}.", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"a JSON object was expected, got {value}.", param, ctx)
        return parsed


class Names(click.ParamType):
    """Names separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sequence[str]:
        if not isinstance(value, str):
            return tuple(value)
        return tuple(name.strip() for name in value.split(",") if name.strip())


_TYPES: Mapping[str, click.ParamType] = {
    "str": click.STRING,
    "int": click.INT,
    "float": click.FLOAT,
    "Mapping[str, Any]": JsonObject(),
    "Sequence[str]": Names(),
}


def engine_options(command: F) -> F:
    """Decorate a click command with one option for each engine argument.

    An option that is not given arrives as None, so that the config file's value, then the default, can stand in;
    `engine_kwargs_from` reads them.
    """
    for entry in reversed(_flag_fields()):
        command = _option(entry)(command)
    return command


def engine_kwargs_from(ctx: click.Context | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments that were given on the command line, as keyword arguments of `modelbay.LLM`.

    ``options``: the command's keyword arguments; those that are no engine argument are left out.
    """
    names = {entry.name for entry in _flag_fields()}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    return {**given, **global_options(ctx).engine_kwargs()}


def flag(name: str) -> str:
    """``max_model_len`` -> ``--max-model-len``."""
    return f"--{name.replace('_', '-')}"


def _flag_fields() -> list[dataclasses.Field[Any]]:
    return [entry for entry in dataclasses.fields(EngineArgs) if entry.metadata["flag"]]


def _option(entry: dataclasses.Field[Any]) -> Callable[[F], F]:
    kind, name = str(entry.type).removesuffix(" | None"), flag(entry.name)
    shown = _shown_default(entry)
    help_text = f"{entry.metadata['help']} [default: {shown}]" if shown else entry.metadata["help"]
    if kind == "bool":
        return click.option(f"{name}/--no-{name[2:]}", entry.name, is_flag=True, default=None, help=help_text)
    choices = entry.metadata["choices"]
    return click.option(
        name, entry.name, type=click.Choice(choices) if choices else _TYPES[kind], default=None, help=help_text
    )


def _shown_default(entry: dataclasses.Field[Any]) -> str | None:
    """For the help text: the options themselves have no default, so that "not given" can be told."""
    if isinstance(entry.default, bool):
        return flag(entry.name) if entry.default else f"--no-{flag(entry.name)[2:]}"
    return None if entry.default is None else str(entry.default)
