"""``modelbay chat``: a conversation in the terminal, streamed. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import click

from modelbay.cli.interrupt import interrupts_wait
from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.errors import UsageError
from modelbay_runtime.cli.media_options import media_parts, user_message
from modelbay_runtime.cli.sampling_options import sampling_options, sampling_params_from

_HELP = (
    "/image PATH and /audio PATH go with the next message, /clear forgets the conversation, /exit (or Ctrl-D) leaves, "
    "Ctrl-C stops an answer."
)


@click.command("chat")
@click.argument("model")
@click.option("--system", help="A system message.")
@sampling_options
@engine_options
@click.pass_context
def command(ctx: click.Context, model: str, system: str | None, **options: Any) -> None:
    """Chat with MODEL in the terminal."""
    sampling_params_from(options, {})
    with interrupts_wait():
        from modelbay_runtime.cli.opening import open_llm

    with open_llm(model, engine_kwargs_from(ctx, options), "generate") as llm:
        params = sampling_params_from(options, llm.resolution.config.generation)
        beginning = [] if system is None else [{"role": "system", "content": system}]
        llm.render([*beginning, {"role": "user", "content": "Hello"}])  # what cannot chat says so before it is asked
        converse(llm, params, beginning)


def converse(llm: Any, params: Any, beginning: list[dict[str, str]]) -> None:
    """Read lines, answer each in the light of all before it."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # line editing and history with the arrow keys, where the platform has it
            import readline  # noqa: F401
        click.echo(_HELP, err=True)
    messages: list[dict[str, Any]] = list(beginning)
    parts: list[dict[str, Any]] = []  # images and audio of the next message
    for line in _lines(interactive):
        if line == "/exit":
            return
        if line == "/clear":
            messages, parts = list(beginning), []
            continue
        if line == "/help":
            click.echo(_HELP)
            continue
        command, _, source = line.partition(" ")
        if command in ("/image", "/audio"):
            parts += _parts(command[1:], source.strip())
            continue
        messages.append(user_message(line, parts))
        parts = []
        try:
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
        except UsageError as error:
            # The conversation outgrew the model: the question is taken back, so that /clear is not the only way on.
            messages.pop()
            click.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:  # before there was an answer to stop
            messages.pop()
            click.echo("(stopped)", err=True)


def _parts(kind: str, source: str) -> list[dict[str, Any]]:
    if not source:
        click.echo(f"/{kind} takes a path or a URL.", err=True)
        return []
    try:
        return media_parts([source], []) if kind == "image" else media_parts([], [source])
    except UsageError as error:
        click.echo(f"error: {error}", err=True)
        return []


def _lines(interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not {error.encoding} text (byte {error.start}).") from error
        except EOFError:
            if interactive:
                click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D leaves)", err=True)
            continue
        if line:
            yield line


def _answer(llm: Any, messages: list[dict[str, Any]], params: Any) -> str:
    """Print the answer as it comes and return it; Ctrl-C keeps what has come so far."""
    text = ""
    with closing(llm.stream(llm.render(messages), params)) as stream:
        try:
            for output in stream:
                now = output.outputs[0].text
                click.echo(now[len(text) :], nl=False)
                text = now
                if output.outputs[0].finish_reason == "error":
                    click.echo(f"\nerror: {output.outputs[0].stop_reason}", nl=False, err=True)
        except KeyboardInterrupt:
            click.echo(" (stopped)", nl=False, err=True)
    click.echo()
    return text
