"""``modelbay version``: the versions that matter in a bug report, read from metadata without importing anything."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from modelbay import __version__
from modelbay.cli.group import global_options
from modelbay.cli.output import print_json, print_table

_LIBRARIES = ("torch", "transformers", "triton", "tokenizers", "safetensors", "huggingface_hub", "fastokens")


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="The same as an object.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Show the versions of Modelbay, Python, the libraries it stands on, and the plugins."""
    versions = {"modelbay": __version__, "python": platform.python_version(), "platform": platform.platform()}
    versions |= {name: found for name in _LIBRARIES if (found := _installed(name))}
    records = global_options(ctx).plugins().records
    plugins = {record.name: f"{record.distribution} {record.version}".rstrip() for record in records}
    if as_json:
        print_json({**versions, "plugins": plugins})
    else:
        rows = [*versions.items(), *((f"plugin {name}", owner) for name, owner in plugins.items())]
        print_table(("what", "version"), rows)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
