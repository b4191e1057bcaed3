"""``modelbay embed``: texts in, vectors out, as many as there are, in constant memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from modelbay.cli.interrupt import interrupts_wait
from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.cli.output import counted
from modelbay_runtime.cli.flags import Flags, at_flag, check_one_prompt, params_of
from modelbay_runtime.cli.texts import FORMATS, in_windows, size_of
from modelbay_runtime.cli.vectors import open_writer
from modelbay_runtime.sampling_params import POOLING_TYPES

#: Texts that are read, embedded and written at a time: enough for full batches, and no more to hold.
_WINDOW = 1024


@click.command("embed")
@click.argument("model")
@click.option("--input", "source", default="-", help="File of texts, one a line; - reads standard input. [default: -]")
@click.option(
    "--input-format",
    type=click.Choice(FORMATS),
    default="auto",
    help="Whether a line is a text or a JSON object with text and id; auto goes by the ending .jsonl. [default: auto]",
)
@click.option("--output", default="-", help="FILE.npy, FILE.jsonl, or - for JSON lines. [default: -]")
@click.option("--prompt-name", help="Which of the model's prompts is put before each text.")
@click.option("--prompt", "before", help="A text to put before each text.")
@click.option("--pooling-type", type=click.Choice(POOLING_TYPES), help="How one vector is made of a text's tokens.")
@click.option("--normalize/--no-normalize", default=None, help="Whether vectors are scaled to length 1.")
@click.option("--dimensions", type=int, help="Keep only so many first numbers of each vector.")
@click.option("--truncate", type=int, help="Cut texts to so many tokens; -1 for as many as the model takes.")
@engine_options
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    source: str,
    input_format: str,
    output: str,
    prompt_name: str | None,
    before: str | None,
    pooling_type: str | None,
    normalize: bool | None,
    dimensions: int | None,
    truncate: int | None,
    **options: Any,
) -> None:
    """Embed texts with MODEL: a directory or a hub id."""
    flags: Flags = {
        "--pooling-type": ("pooling_type", pooling_type),
        "--normalize/--no-normalize": ("normalize", normalize),
        "--dimensions": ("dimensions", dimensions),
        "--truncate": ("truncate_prompt_tokens", truncate),
    }
    params = params_of(flags)
    check_one_prompt(before, prompt_name)
    with interrupts_wait():
        from modelbay_runtime.llm import LLM
        from modelbay_runtime.pooling.calls import check_embeds
        from modelbay_runtime.progress import progress_bar

    with LLM(model, **engine_kwargs_from(ctx, {**options, "convert": options.get("convert") or "embed"})) as llm:
        params_of(flags, lambda given: check_embeds(llm, given))
        at_flag("--prompt-name", lambda: check_embeds(llm, params, prompt_name=prompt_name))
        writer, complete = open_writer(output), False
        try:
            with progress_bar(size_of(source) or 0, "Bytes", output != "-") as bar:
                embed = partial(
                    llm.embed, pooling_params=params, prompt_name=prompt_name, prompt=before, use_tqdm=False
                )
                for window, outputs in in_windows(source, input_format, _WINDOW, embed):
                    writer.write([line.id for line in window], [found.embedding for found in outputs])
                    bar.update(sum(line.size for line in window))
            complete = True
        finally:
            writer.close(complete=complete)
    size = f" of {counted(writer.size, 'number')}" if writer.count else ""
    where = "standard output" if output == "-" else output
    click.echo(f"wrote {counted(writer.count, 'embedding')}{size} to {where}", err=True)
