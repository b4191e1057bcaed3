"""``modelbay lock MODEL``: write down everything that a run is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.errors import UsageError


@click.command("lock")
@click.argument("model")
@click.option("-o", "--output", default="modelbay.lock", show_default=True, help="The file to write; - prints it.")
@engine_options
@click.pass_context
def command(ctx: click.Context, model: str, output: str, **options: Any) -> None:
    """Lock MODEL: commits, the SHA-256 of every file that is used, settings, and versions. Loads no weights.

    A run with --locked FILE takes these commits and settings, and refuses what differs.
    """
    if not output.strip():
        raise UsageError("--output is empty: a lock needs the name of a file.", hint="Leave it out, or name one.")
    from modelbay.lock import Lock
    from modelbay.resolve import resolve

    lock = Lock.of(resolve(model, **engine_kwargs_from(ctx, options)))
    if output == "-":
        click.echo(lock.to_json(), nl=False)
        return
    lock.write(Path(output))
    files = sum(
        len(entry["files"]) for entry in (lock.data["model"], lock.data["tokenizer"], *lock.data["code"]) if entry
    )
    click.echo(f"wrote {output}: {files} files, {len(lock.data['plugins'])} plugin distributions")
