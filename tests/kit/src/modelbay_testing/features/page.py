"""docs/features.md, from the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelbay.unserved import ENGINE_ARGUMENTS, SAMPLING_PARAMETERS
from modelbay_testing.features.table import COLUMNS, ROWS, Cell, NoEffect, Refused, Row, Works

PAGE = Path("docs/features.md")

_HEAD = """\
# Features

<!-- Written by `make features`. Do not edit. -->

What the engine offers, on each kind of model. Every cell is a test of its own on a small model (`tests/features`), and
this page is written from the table that those tests run:

* **yes**: it works, with the result that Transformers gives in float32.
* **refused**: asking for it is an error that says so, before anything is computed.
* **no effect**: there is nothing that it could change; asking for it gives the same as not asking.

"Native" are model classes of plugins (here Llama; DeepSeek-V3 where it takes experts). "Transformers backend" is
Transformers' own model code (here Qwen3-MoE), "encoder-only" what reads both ways and is pooled (BERT), "multimodal"
what reads images or audio beside text (LLaVA). Encoder-only and multimodal models run on the Transformers backend.
Which architecture can be divided over processes is listed under [Supported models](supported_models.md).

"""

_UNSERVED = """
## Arguments of vLLM that mean nothing here

They are refused with the reason, like every argument that is not known: somebody may rely on one that is dropped in
silence.

"""


def render() -> str:
    """The whole page."""
    lines = [_line(["Feature", *COLUMNS.values()]), _line(["---"] * (1 + len(COLUMNS)))]
    lines += [_line([row.feature, *(_word(row.cell(column)) for column in COLUMNS)]) for row in ROWS]
    sections = "".join(_section(row) for row in ROWS)
    return _HEAD + "\n".join(lines) + "\n\n## What each test shows\n" + sections + _unserved()


def _unserved() -> str:
    """What code written for vLLM may pass, and is told."""
    lines = [_line(["Argument", "Why not", "Instead"]), _line(["---"] * 3)]
    for table, owner in ((ENGINE_ARGUMENTS, ""), (SAMPLING_PARAMETERS, "`SamplingParams`: ")):
        alike: dict[tuple[str, str | None], list[str]] = {}
        for name, told in table.items():
            alike.setdefault(told, []).append(f"`{name}`")
        for (reason, hint), names in alike.items():
            lines.append(_line([owner + ", ".join(names), reason[0].upper() + reason[1:], hint or ""]))
    return _UNSERVED + "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _word(cell: Cell) -> str:
    if isinstance(cell, Works):
        return "yes"
    return "refused" if isinstance(cell, Refused) else "no effect"


def _section(row: Row) -> str:
    lines = [f"Asked for by {row.asked}."]
    if row.shown:
        lines.append(f"Works: {row.shown}.")
    for words, columns in _remarks(row).items():
        lines.append(f"{', '.join(columns)}: {words}")
    return f"\n### {row.feature}\n\n" + "\n".join(f"* {line}" for line in lines) + "\n"


def _remarks(row: Row) -> dict[str, list[str]]:
    """What is to be said of single cells, and of which."""
    found: dict[str, list[str]] = {}
    for column, name in COLUMNS.items():
        words = _remark(row.cell(column))
        if words:
            found.setdefault(words, []).append(name)
    return found


def _remark(cell: Cell) -> str:
    if isinstance(cell, NoEffect):
        return f"no effect, since {cell.why}."
    if isinstance(cell, Refused):
        note = f" {cell.note}" if cell.note else ""
        return f"refused, “… {cell.says} …”.{note}"
    return f"{cell.note}." if cell.note else ""
