"""``modelbay list-archs``: every architecture that the installed plugins serve."""

from __future__ import annotations

import click

from modelbay.architectures import Architecture, architectures, architectures_of_backends
from modelbay.cli.group import global_options
from modelbay.cli.output import print_json, print_table
from modelbay.registry import canonical
from modelbay.specs import TASKS


@click.command("list-archs")
@click.option("--task", type=click.Choice(TASKS), help="Only those that serve this task.")
@click.option("--model-type", metavar="TYPE", help="Only those of this model_type.")
@click.option("--owner", metavar="DIST", help="Only those of this distribution.")
@click.option("--all", "everything", is_flag=True, help="Also those that only a backend serves (transformers).")
@click.option("--json", "as_json", is_flag=True, help="A list of objects.")
@click.pass_context
def command(
    ctx: click.Context, task: str | None, model_type: str | None, owner: str | None, everything: bool, as_json: bool
) -> None:
    """List the architectures that the installed plugins serve, with their owners.

    Where parallelism or attention is "derived", nothing is declared: it is read off the layers when a model is built,
    and `modelbay plan MODEL` says what comes of it. Without model types, only the architecture's name counts.
    """
    plugins = global_options(ctx).plugins()
    listed = [
        arch
        for arch in architectures(plugins) + (architectures_of_backends(plugins) if everything else [])
        if task in (None, *arch.tasks)
        and model_type in (None, *arch.model_types)
        and (owner is None or canonical(owner) == canonical(arch.owner.distribution))
    ]
    if as_json:
        print_json([arch.to_dict() for arch in listed])
    elif listed:
        print_table(("name", "tasks", "owner", "model types", "parallel", "attention"), [_row(arch) for arch in listed])
    else:
        click.echo("No installed plugin serves such an architecture.", err=True)


def _row(arch: Architecture) -> list[str]:
    model_types = ", ".join(arch.model_types) or "-"
    facts = (", ".join(declared) or "derived" for declared in (arch.parallel, arch.attention))
    return [arch.name, ", ".join(arch.tasks), str(arch.owner), model_types, *facts]
