"""``modelbay bench``: the throughput of one model, in this process."""

from __future__ import annotations

import time
from typing import Any

import click

from modelbay.cli.interrupt import interrupts_wait
from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.cli.output import print_json, print_table
from modelbay_runtime.bench import DEFAULT_SHAPES, Spread, check_fits, generate_with, measure, parse_shapes


@click.command("bench")
@click.argument("model")
@click.option(
    "--shapes",
    default=DEFAULT_SHAPES,
    help=f"Sequences x prompt + output tokens, separated by commas. [default: {DEFAULT_SHAPES}]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    help="Counted runs of each shape. [default: 3]",
)
@click.option("--json", "as_json", is_flag=True, help="The same as an object, with every round.")
@engine_options
@click.pass_context
def command(ctx: click.Context, model: str, shapes: str, rounds: int, as_json: bool, **options: Any) -> None:
    """Measure how many tokens per second MODEL gives: output tokens, or prompt tokens where the output is one.

    Prompts are random token ids, other ones in each round. The numbers say something about this machine at this
    moment; to compare with another engine, measure both in turn (benchmarks/compare.py).
    """
    wanted = parse_shapes(shapes)  # a bad one is refused before anything is loaded
    with interrupts_wait():
        from modelbay_runtime.cli.opening import open_llm

    start = time.perf_counter()
    kwargs = engine_kwargs_from(ctx, options)
    with open_llm(model, kwargs, "generate") as llm:
        loaded = time.perf_counter() - start
        config = llm.resolution.config
        check_fits(wanted, llm.engine.max_model_len)
        generate = generate_with(llm)
        seed = str(llm.resolution.args.seed)
        rates = [measure(generate, shape, config.vocab_size, rounds=rounds, seed=seed) for shape in wanted]
    measured = list(zip(wanted, rates, strict=True))
    if as_json:
        rows = [{"shape": str(shape), "unit": shape.unit, **rate.to_dict()} for shape, rate in measured]
        print_json({"model": model, "dtype": config.dtype, "load_seconds": round(loaded, 3), "shapes": rows})
        return
    table = [[str(shape), *_cells(rate), shape.unit] for shape, rate in measured]
    print_table(["shape", "median", "min", "max", "unit"], table)


def _cells(rate: Spread) -> list[str]:
    return [f"{value:.1f}" for value in (rate.median, min(rate.values), max(rate.values))]
