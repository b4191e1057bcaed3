"""What modelbay-server adds to Modelbay: the command ``serve``. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import CommandSpec


@hookimpl
def register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            name="serve", target="modelbay_server.command:command", summary="Serve models over HTTP, as OpenAI's API."
        )
    ]
