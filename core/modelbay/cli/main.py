"""The command ``modelbay``: runs a subcommand and turns whatever happens into one line and an exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import click

from modelbay.cli.group import build_group, split_global_options
from modelbay.cli.output import printable
from modelbay.errors import ModelbayError
from modelbay.unserved import why_unserved

#: What a shell reports for a program that SIGINT (2) or SIGPIPE (13) ended.
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main() -> NoReturn:
    """The entry point of ``modelbay``, ``framework`` and ``python -m modelbay``."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code: 0, 1 for failure, 2 for usage, 130 for Ctrl-C."""
    debug = "--debug" in split_global_options(argv)[0]
    _open_closed_streams()
    _print_everything()
    with _log_lines():
        try:
            code = _invoke(argv)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            _silence_stdout()
            return _BROKEN_PIPE
        except (KeyboardInterrupt, click.Abort):
            print("interrupted", file=sys.stderr)
            return _INTERRUPTED
        except Exception as error:
            return _report(error, debug)


def _open_closed_streams() -> None:
    """A standard stream that the shell closed (``>&-``) reads and writes nothing: Python has None there, and the next
    file to be opened, a model's weights, would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _print_everything() -> None:
    """What an encoding has no word for (half of a character, out of a file or a file's name) is printed escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # what is left to be flushed cannot be
                stream.reconfigure(errors="backslashreplace")


def _invoke(argv: Sequence[str]) -> int:
    # Not click's own main(): it prints usage errors in several lines and Ctrl-C as an empty one.
    group = build_group()
    try:
        with group.make_context(_program(), list(argv)) as ctx:
            group.invoke(ctx)
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.UsageError as request:
        if type(request).__name__ != "NoArgsIsHelpError":  # which click has from 8.2 on
            raise
        print(request.format_message(), file=sys.stderr)  # a group alone: its help is no message of one line
        return request.exit_code
    return 0


def _program() -> str:
    name = os.path.basename(sys.argv[0]).removesuffix(".exe")
    return name if name in ("modelbay", "framework") else "modelbay"


def _report(error: Exception, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    message, code = _described(error)
    print(f"error: {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(message: str) -> str:
    """Without line breaks, and without what a name out of a checkpoint could do to a terminal."""
    return printable(" ".join(message.split()))


def _described(error: Exception) -> tuple[str, int]:
    """The message and the exit code."""
    if isinstance(error, ModelbayError):
        return str(error), error.exit_code
    if isinstance(error, click.NoSuchOption) and (reason := why_unserved(error.option_name)):
        return reason, error.exit_code
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else _program()
        return f"{error.format_message()} Try '{where} --help'.", error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, OSError) and error.strerror:  # the machine's fault (disk full, not readable), not ours
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror, 1
    return f"internal: {type(error).__name__}: {error} (run with --debug)", 1


def _silence_stdout() -> None:
    """The reader of our output has gone (``| head``): let the interpreter's last flush go nowhere."""
    with suppress(OSError, ValueError):  # where stdout has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _log_lines() -> Iterator[None]:
    """Messages of the logger ``modelbay`` and those below it become lines on stderr while a command runs."""
    logger = logging.getLogger("modelbay")
    handler, level = _Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Lines(logging.Handler):
    """Each message once: a command may load the plugins more than once, and would warn each time."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = _one_line(record.getMessage())
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        if line not in self._seen:
            self._seen.add(line)
            with suppress(OSError):  # a full disk: what goes on without its log does go on
                print(line, file=sys.stderr)
