"""The top-level command: subcommands are `CommandSpec` records, imported only when they run or show their own help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from modelbay.errors import PluginError, UsageError
from modelbay.plugins import Plugins, load_plugins
from modelbay.settings import parse_prefer
from modelbay.specs import load_target

_WITH_VALUE = ("--plugins", "--prefer")
_FLAGS = ("--strict-plugins", "--debug")


@dataclass(slots=True)
class GlobalOptions:
    """The options that stand before (or after) any subcommand."""

    plugin_names: list[str] | None = None
    prefer: dict[str, str] = field(default_factory=dict)
    strict_plugins: bool = False
    debug: bool = False
    _plugins: Plugins | None = None

    def plugins(self) -> Plugins:
        """The plugins as these options select them, loaded once."""
        if self._plugins is None:
            self._plugins = load_plugins(self.plugin_names, prefer=self.prefer, strict=self.strict_plugins)
        return self._plugins

    def engine_kwargs(self) -> dict[str, Any]:
        """These options as engine arguments; only those that were given."""
        said = {"prefer": self.prefer, "strict_plugins": self.strict_plugins}
        given = {name: value for name, value in said.items() if value}
        return given if self.plugin_names is None else {"plugins": self.plugin_names, **given}


def global_options(ctx: click.Context | None) -> GlobalOptions:
    """The global options of this run (the defaults where a command is called on its own)."""
    if ctx is None:
        return GlobalOptions()
    root = ctx.find_root()
    if not isinstance(root.obj, GlobalOptions):
        root.obj = _from_params(root.params)
    return root.obj


def _from_params(params: dict[str, Any]) -> GlobalOptions:
    names = params.get("plugins")
    return GlobalOptions(
        plugin_names=None if names is None else [name.strip() for name in names.split(",") if name.strip()],
        prefer=parse_prefer(params.get("prefer") or (), "--prefer"),
        strict_plugins=bool(params.get("strict_plugins")),
        debug=bool(params.get("debug")),
    )


def split_global_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The global options, wherever they stand, and the rest. What follows ``--`` is never one of them."""
    ours: list[str] = []
    rest: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument == "--":
            rest += [argument, *arguments]
            break
        if argument in _FLAGS or argument.startswith(tuple(f"{option}=" for option in _WITH_VALUE)):
            ours.append(argument)
        elif argument in _WITH_VALUE and arguments:
            ours += [argument, arguments.pop(0)]
        else:
            rest.append(argument)
    return ours, rest


class PluginGroup(click.Group):
    """A group whose commands come from plugins."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, rest = split_global_options(args)
        return super().parse_args(ctx, [*ours, *rest])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return global_options(ctx).plugins().names("commands")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        owned = global_options(ctx).plugins().get("commands", cmd_name)
        if owned is None:
            return None
        command = load_target(owned.value.target)
        if not isinstance(command, click.Command):
            raise PluginError(f"{owned.value.target!r} of {owned.owner} is not a click command.")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None and not ctx.resilient_parsing:
            hint = global_options(ctx).plugins().absent_hint("commands", name)
            raise UsageError(f"no such command {name!r}.", hint=hint)
        return name, command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        plugins = global_options(ctx).plugins()
        summaries: dict[str, str] = {}
        for owned in plugins.all("commands"):
            name, summary = owned.value.name, owned.value.summary
            several = len(plugins.owners("commands", name)) > 1 and plugins.preference(name) is None
            summaries[name] = "Offered by several plugins: --prefer one." if several else summary
        with formatter.section("Commands"):
            formatter.write_dl(list(summaries.items()))


def build_group() -> PluginGroup:
    """A fresh top-level command."""
    return PluginGroup(
        name="modelbay",
        help="Any Hugging Face model reference, made a running PyTorch model by plugins; every decision explained.",
        epilog="The options above may stand before or after the command.",
        params=_global_params(),
    )


def _global_params() -> list[click.Parameter]:
    # Eager, so that --help already knows which plugins are selected.
    return [
        click.Option(
            ["--plugins"], is_eager=True, metavar="NAMES", help='Plugins to load, separated by commas; "" loads none.'
        ),
        click.Option(["--strict-plugins"], is_flag=True, is_eager=True, help="Fail when a plugin fails to load."),
        click.Option(
            ["--prefer"],
            multiple=True,
            is_eager=True,
            metavar="NAME=DIST",
            help="The distribution that serves a name which two offer. May be repeated.",
        ),
        click.Option(["--debug"], is_flag=True, is_eager=True, help="Show a traceback with an error."),
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show Modelbay's version.",
        ),
    ]


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from modelbay import __version__

        click.echo(f"modelbay {__version__}")
        ctx.exit()
