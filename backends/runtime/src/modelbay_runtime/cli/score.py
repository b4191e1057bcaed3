"""``modelbay score``: how well each of many documents answers a query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from modelbay.cli.interrupt import interrupts_wait
from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.cli.output import print_json
from modelbay.errors import UsageError
from modelbay_runtime.cli.flags import Flags, at_flag, check_one_prompt, params_of
from modelbay_runtime.cli.texts import FORMATS, Line, in_windows
from modelbay_runtime.sampling_params import PoolingParams

_WINDOW = 1024


@click.command("score")
@click.argument("model")
@click.argument("query")
@click.option("--documents", required=True, help="File of documents, one a line; - reads standard input.")
@click.option(
    "--input-format",
    type=click.Choice(FORMATS),
    default="auto",
    help="Whether a line is a text or a JSON object with text and id; auto goes by the ending .jsonl. [default: auto]",
)
@click.option("--prompt-name", help="Which of a cross-encoder's prompts is put before the query.")
@click.option("--prompt", "before", help="A text to put before the query of a cross-encoder; '' for none.")
@click.option("--top", type=int, help="Only so many best documents, best first; all in their order if not given.")
@click.option("--truncate", type=int, help="Cut pairs to so many tokens; -1 for as many as the model takes.")
@click.option("--raw", is_flag=True, help="A cross-encoder's logit, without its activation.")
@click.option("--json", "as_json", is_flag=True, help="A list of objects: line, score, document.")
@engine_options
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    query: str,
    documents: str,
    input_format: str,
    prompt_name: str | None,
    before: str | None,
    top: int | None,
    truncate: int | None,
    raw: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Score documents for QUERY with MODEL: a cross-encoder, or a model that embeds (cosine)."""
    if top is not None and top < 1:
        raise UsageError(f"--top must be a positive number, got {top}.")
    flags: Flags = {
        "--truncate": ("truncate_prompt_tokens", truncate),
        "--raw": ("use_activation", False if raw else None),
    }
    params = params_of(flags)
    check_one_prompt(before, prompt_name)
    prompts = {"prompt_name": prompt_name, "prompt": before}
    with interrupts_wait():
        from modelbay_runtime.cli.opening import open_llm
        from modelbay_runtime.pooling.calls import check_query, check_scores, query_prompt

    found: list[tuple[float, Line]] = []
    with open_llm(model, engine_kwargs_from(ctx, options), "score") as llm:
        params_of(flags, lambda given: check_scores(llm, given))
        at_flag("--prompt-name", lambda: query_prompt(llm, prompt_name, None))
        at_flag("--prompt", lambda: query_prompt(llm, None, before))
        at_flag("QUERY", lambda: check_query(llm, query, params, query_prompt(llm, **prompts)))
        for score, line in _scores(llm, query, documents, input_format, params, prompts):
            if top is None and not as_json:
                click.echo(f"{score:.6f}\t{line.prompt}")
                continue
            found.append((score, line))
            if top is not None and len(found) >= 2 * top + _WINDOW:
                found = _best(found, top)
    if top is not None:
        found = _best(found, top)
    if as_json:
        print_json([{"line": line.number, "score": score, "document": line.prompt} for score, line in found])
    elif top is not None:
        for score, line in found:
            click.echo(f"{score:.6f}\t{line.prompt}")


def _scores(
    llm: Any, query: str, documents: str, input_format: str, params: PoolingParams, prompts: Mapping[str, str | None]
) -> Iterator[tuple[float, Line]]:
    def run(texts: list[str]) -> list[Any]:
        return llm.score(query, texts, params, use_tqdm=False, **prompts)

    for window, outputs in in_windows(documents, input_format, _WINDOW, run):
        yield from zip((output.score for output in outputs), window, strict=True)


def _best(found: list[tuple[float, Line]], top: int) -> list[tuple[float, Line]]:
    return sorted(found, key=lambda pair: (-pair[0], pair[1].number))[:top]
