"""Printing: JSON for programs, a rich table on a terminal, whole lines of plain text everywhere else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

#: A line as pieces of text with a rich style ("" for none).
StyledLine = Sequence[tuple[str, str]]


def counted(number: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def printable(text: str, keep: str = "") -> str:
    """The text without what a name out of a file could do to a terminal, or to whoever reads one line for each name.

    Escaped as in Python: control characters, spaces and marks that cannot be seen, halves of a character.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def print_json(data: Any) -> None:
    """Indented JSON; what JSON has no word for (paths, dtypes) is shown as text."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=not _speaks_unicode(), default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table. Piped, nothing is cut or wrapped: one row is one line, columns are two spaces apart."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    lines = [[column.upper() for column in columns], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_lines(lines: Iterable[StyledLine]) -> None:
    """Styled lines on a terminal, the same text without styles elsewhere."""
    lines = ([(printable(text, keep="\n"), style) for text, style in line] for line in lines)
    if not sys.stdout.isatty():
        for line in lines:
            click.echo("".join(text for text, _ in line))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text.assemble(*line))


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _speaks_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") == "utf8"
