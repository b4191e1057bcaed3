"""``modelbay list-plugins``: what is installed, what it registers, what failed and why."""

from __future__ import annotations

import click

from modelbay.cli.group import global_options
from modelbay.cli.output import print_json, print_table
from modelbay.registry import PluginRecord


@click.command("list-plugins")
@click.option("--json", "as_json", is_flag=True, help="A list of objects.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the installed plugins: versions, hooks, failures."""
    records = global_options(ctx).plugins().records
    if as_json:
        print_json([record.to_dict() for record in records])
    else:
        print_table(("plugin", "distribution", "version", "status", "registers"), [_row(record) for record in records])


def _row(record: PluginRecord) -> list[str]:
    detail = record.error or ", ".join(hook.removeprefix("register_") for hook in record.hooks) or "-"
    return [record.name, record.distribution, record.version, record.status, detail]
