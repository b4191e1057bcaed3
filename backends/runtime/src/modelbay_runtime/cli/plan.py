"""``modelbay plan MODEL``: which rank would hold what, and how many bytes of it. No weights, no devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.cli.output import StyledLine, counted, print_json, print_lines

if TYPE_CHECKING:
    from modelbay_runtime.parallel.holdings import ActiveParameters, Holdings, RankHoldings

_ALIASES = {
    "tensor_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "data_parallel_size": "--dp",
    "enable_expert_parallel": "--ep",
}
#: More lines than this are one for each stage; --json has every rank.
_MOST_LINES = 32
#: Of one line, the numbers of ranks that hold the same.
_MOST_NUMBERS = 16


@click.command("plan")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="The same as data, rank by rank.")
@engine_options
@click.pass_context
def command(ctx: click.Context, model: str, as_json: bool, **options: Any) -> None:
    """Print how MODEL would be split over ranks: who holds which layers, experts and tokens, and how many bytes.

    Everything is built as it would be to run, without memory for it: no weights are loaded or downloaded, and no other
    process or device is needed. Sizes that do not divide are refused with the numbers.
    """
    from modelbay.resolve import resolve
    from modelbay_runtime.cli.held import held_warnings
    from modelbay_runtime.parallel.holdings import holdings
    from modelbay_runtime.parallel.mesh import Mesh

    with held_warnings():
        resolution = resolve(model, **engine_kwargs_from(ctx, options))
        found = holdings(resolution, Mesh.of(resolution.args))
    if as_json:
        print_json({"model": model, **found.to_dict()})
    else:
        print_lines(_render(model, found))


for _option in command.params:
    if _option.name in _ALIASES:
        _option.opts.append(_ALIASES[_option.name])


def _render(model: str, found: Holdings) -> Iterator[StyledLine]:
    yield [(f"{model}: ", "bold"), (str(found.mesh), "")]
    once = f"{_count(found.parameters)} ({found.parameters:,}), each counted once"
    yield [("  parameters: ", "dim"), (once, "")]
    parts = f"{found.copies:,} copies and {found.padding:,} padding"
    yield [("  held by all ranks: ", "dim"), (f"{_count(found.held)} ({found.held:,}), of it {parts}", "")]
    if active := found.active:
        yield [("  active per token: ", "dim"), *_active(active, found.parameters)]
    lines = list(_ranks(found))
    if len(lines) > _MOST_LINES:
        lines = list(_stages(found))
    for title, text in lines:
        yield [(f"  {title}: ", "bold"), (text, "")]


def _active(active: ActiveParameters, parameters: int) -> StyledLine:
    if active.without_embedding == parameters:
        return [("all of them", "")]
    numbers = _count(active.without_embedding)
    if active.with_embedding != active.without_embedding:
        numbers += f", {_count(active.with_embedding)} with the input embedding"
    return [(numbers, ""), (f" = {active.formula}", "dim")]


def _ranks(found: Holdings) -> Iterator[tuple[str, str]]:
    """One line for each rank; replicas that hold the same share it."""
    same: dict[tuple[Any, ...], list[RankHoldings]] = {}
    for rank in found.ranks:
        same.setdefault((rank.stage, rank.share, rank.experts), []).append(rank)
    for ranks in same.values():
        numbers = ", ".join(str(rank.rank) for rank in ranks[:_MOST_NUMBERS])
        if len(ranks) > _MOST_NUMBERS:
            numbers += f", … {ranks[-1].rank} ({len(ranks):,})"
        yield f"rank{'s' if len(ranks) > 1 else ''} {numbers}", _describe(found, ranks[0])


def _stages(found: Holdings) -> Iterator[tuple[str, str]]:
    for stage in range(found.mesh.pp):
        ranks = [rank for rank in found.ranks if rank.stage == stage]
        yield f"stage {stage}, each of {counted(len(ranks), 'rank')}", _describe(found, ranks[0], each=True)


def _describe(found: Holdings, rank: RankHoldings, *, each: bool = False) -> str:
    parts = _span("layer", *rank.layers)
    if rank.experts:
        first, end = rank.experts
        parts += [counted(end - first, "expert")] if each else _span("expert", first, end)
    parts += [name.removeprefix("model.") for name in rank.outside]
    if rank.tokens and not each:
        parts += _span("token", *rank.tokens) or ["no tokens"]
    sizes = f"{rank.parameters:,} parameters, {_size(rank.weight_bytes)} in {found.dtype}"
    cache = f"{rank.kv_bytes:,} bytes of cache per token"
    if rank.state_bytes:
        cache += f" and {rank.state_bytes:,} per sequence"
    return f"{', '.join(parts)}; {sizes}; {cache}"


def _span(what: str, first: int, end: int) -> list[str]:
    """From the first number to before the end; nothing if there is none."""
    if end - first == 1:
        return [f"{what} {first}"]
    return [f"{what}s {first}-{end - 1}"] if first < end else []


def _count(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{name}"
    return f"{number:,}"


def _size(number: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:,} bytes"
