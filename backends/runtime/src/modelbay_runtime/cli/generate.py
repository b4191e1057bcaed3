"""``modelbay generate``: prompts in, text or JSON out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from modelbay.cli.interrupt import interrupts_wait
from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.cli.output import print_json
from modelbay.errors import EngineError, UsageError
from modelbay.weights.accounting import LoadReport
from modelbay_runtime.cli.media_options import media_options, media_parts, user_message, with_media
from modelbay_runtime.cli.sampling_options import sampling_options, sampling_params_from


@click.command("generate")
@click.argument("model")
@click.option("--prompt", "prompts", multiple=True, help="The prompt; several make a batch; - reads standard input.")
@click.option(
    "--chat", "as_chat", is_flag=True, help="Put each prompt into the model's chat template as a user message."
)
@click.option("--system", help="A system message for --chat.")
@click.option("-n", "--n", type=int, default=1, help="Outputs for each prompt.")
@click.option(
    "--logprobs", type=int, default=None, help="Log-probabilities of this many likeliest tokens (with --json)."
)
@click.option("--json", "as_json", is_flag=True, help="Everything about each output, as data.")
@click.option("--verbose", is_flag=True, help="Say what became of every tensor of the checkpoint, on standard error.")
@media_options
@sampling_options
@engine_options
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    prompts: Sequence[str],
    as_chat: bool,
    system: str | None,
    n: int,
    logprobs: int | None,
    as_json: bool,
    verbose: bool,
    image: Sequence[str],
    audio: Sequence[str],
    **options: Any,
) -> None:
    """Generate text with MODEL: a directory, a file that carries a whole model, or a hub id."""
    texts = _read_prompts(prompts)
    parts = media_parts(image, audio)
    if system is not None and not as_chat:
        raise UsageError("--system is a message of a conversation: it needs --chat.")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is shown as data only: it needs --json.")
    sampling_params_from(options, {}, n=n, logprobs=logprobs)  # a bad value is refused before anything is loaded
    with interrupts_wait():
        from modelbay_runtime.cli.opening import open_llm

    with open_llm(model, engine_kwargs_from(ctx, options), "generate") as llm:
        if verbose:
            _print_report(llm.load_report)
        params = sampling_params_from(options, llm.resolution.config.generation, n=n, logprobs=logprobs)
        before = [] if system is None else [{"role": "system", "content": system}]
        wanted = [
            llm.render([*before, user_message(text, parts)]) if as_chat else with_media(text, parts) for text in texts
        ]
        if len(wanted) == 1 and n == 1 and not as_json:
            _print_stream(llm.stream(wanted[0], params))
            return
        outputs = llm.generate(wanted, params)
    if as_json:
        print_json([output.to_dict() for output in outputs])
        _require_complete(outputs)
        return
    for text, output in zip(texts, outputs, strict=True):
        for completion in output.outputs:
            click.echo(f"=== {text}" if n == 1 else f"=== {text} [{completion.index}]")
            click.echo(completion.text)
    _require_complete(outputs)


def _read_prompts(prompts: Sequence[str]) -> list[str]:
    if not prompts:
        raise UsageError("no prompt was given.", hint="Use --prompt TEXT, or --prompt - to read standard input.")
    if prompts.count("-") > 1:
        raise UsageError("--prompt - was given more than once, and standard input can be read only once.")
    try:
        return [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not {error.encoding} text (byte {error.start}).") from error


def _print_report(report: LoadReport) -> None:
    """Every tensor on disk and what became of it, then the sum, on standard error."""
    for use in report.tensors.values():
        where = use.rule or ", ".join(use.targets)
        print(f"{use.status:9} {use.name} [{use.file}] -> {where}", file=sys.stderr)
    print(report.summary(), file=sys.stderr)


def _print_stream(stream: Any) -> None:
    """Each new piece as soon as it is certain."""
    shown = 0
    for output in stream:
        text = output.outputs[0].text
        click.echo(text[shown:], nl=False)
        shown = len(text)
    click.echo()
    _require_complete([output])


def _require_complete(outputs: Sequence[Any]) -> None:
    """What was generated is shown first; that some of it is not what was asked for is an error all the same."""
    for completion in [completion for output in outputs for completion in output.outputs]:
        if completion.finish_reason == "error":
            raise EngineError(str(completion.stop_reason))
