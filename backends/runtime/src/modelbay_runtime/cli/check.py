"""``modelbay check MODEL``: will it run here? Answered without its weights, by what would run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.cli.output import StyledLine, counted, print_json, print_lines

if TYPE_CHECKING:
    from modelbay_runtime.check import CheckReport, MemoryNeed
    from modelbay_runtime.parallel.sizes import TensorParallelSize


@click.command("check")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="The same as data.")
@engine_options
@click.pass_context
def command(ctx: click.Context, model: str, as_json: bool, **options: Any) -> None:
    """Check whether MODEL would run here: by which backend, in how much memory, and what is missing.

    No weights are loaded or downloaded. Exit code 0 is yes, 1 is no, 2 is no because of an argument.
    """
    from modelbay_runtime.check import check_model

    report = check_model(model, engine_kwargs_from(ctx, options))
    if as_json:
        print_json(report.to_dict())
    else:
        print_lines(_render(report))
    ctx.exit(report.exit_code)


def _render(report: CheckReport) -> Iterator[StyledLine]:
    verdict = ("yes, it runs here", "bold green") if report.runs else ("no, it does not run here", "bold red")
    yield [(f"{report.model}: ", "bold"), verdict]
    for missing in report.missing:
        yield [(f"  missing {missing.kind}: ", "red"), (missing.message, "")]
        if missing.hint:
            yield [("    ", ""), (missing.hint, "")]
    for name, value in _facts(report):
        yield [(f"  {name}: ", "dim"), (value, "")]
    for decision in report.trace.warnings():
        yield [(f"  ! {decision.question}: {decision.answer} [{decision.source}]", "yellow")]


def _facts(report: CheckReport) -> Iterator[tuple[str, str]]:
    if found := report.resolution:
        owner = f", {found['owner']}" if found["owner"] else ""
        yield "backend", f"{found['backend']} ({found['architecture']}{owner}), to {found['task']}"
    if weights := report.weights:
        size = f", {_size(weights['bytes'])}" if weights["bytes"] is not None else ""
        download = f", {_size(weights['to_download'])} to download" if weights["to_download"] else ""
        yield "checkpoint", f"{counted(len(weights['files']), weights['load_format'] + ' file')}{size}{download}"
    if report.memory:
        yield from _memory(report.memory)
    if sizes := report.tensor_parallel_sizes:
        yield "tensor parallel sizes", _sizes(sizes)


def _sizes(sizes: list[TensorParallelSize]) -> str:
    """Those that were tried, and those that the config's numbers allow."""
    from modelbay_runtime.slicing import TRIED

    tried, larger = ([str(size) for size in sizes if (size.size > TRIED) is beyond] for beyond in (False, True))
    untried = f"; by the config's numbers also {', '.join(larger)}" if larger else ""
    return ", ".join(tried) + untried


def _memory(need: MemoryNeed) -> Iterator[tuple[str, str]]:
    copies = f", {_size(need.copies)} of it a second form of the tied head" if need.copies else ""
    yield "weights", f"{_size(need.weights)} in {need.dtype} on {need.device}{copies}"
    yield "cache", f"{_size(need.cache_per_token)} per token, {_size(need.cache_per_sequence)} for the longest sequence"
    yield "free", f"{_size(need.free)} may be taken, {_size(need.activations)} of it for a step"
    if need.sequences is not None and need.max_model_len is not None:
        yield "room for", f"{counted(need.sequences, 'sequence')} of {counted(need.max_model_len, 'token')}"


def _size(number: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    value, unit = float(number), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{number} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
