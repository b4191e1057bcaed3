"""``modelbay serve``: models over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from modelbay.cli.interrupt import interrupts_wait
from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay_server.settings import ServerSettings, model_sources, parse_bytes
from modelbay_server.tool_forms import PARSERS

_KEY_VARIABLE = "MODELBAY_API_KEY"


@click.command("serve")
@click.argument("model", required=False)
@click.option("--model", "more_models", multiple=True, help="A further model; may be given several times.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    help="Name that requests use, instead of MODEL. Several are names of the one model; of several models, one each.",
)
@click.option(
    "--api-key",
    envvar=_KEY_VARIABLE,
    help=f"Key that clients must send. Better in the variable {_KEY_VARIABLE}, where no process list shows it.",
)
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False), help="Certificate, for TLS.")
@click.option("--ssl-keyfile", type=click.Path(exists=True, dir_okay=False), help="Its private key.")
@click.option(
    "--allowed-origin", "origins", multiple=True, help="Web origin whose pages may call the server; may be repeated."
)
@click.option(
    "--max-concurrent-requests",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Requests that may run or wait at once; more get 429.",
)
@click.option(
    "--max-request-bytes",
    type=click.IntRange(1024),
    default=8 * 1024**2,
    show_default=True,
    help="Largest body of a request.",
)
@click.option(
    "--max-answer-entries",
    type=click.IntRange(1),
    default=2_000_000,
    show_default=True,
    help="Most log-probabilities and token ids of one answer; a request that may need more gets 400.",
)
@click.option(
    "--model-memory",
    help="Most memory for all loaded models, as 16GiB; the least recently used idle one goes. [default: no limit]",
)
@click.option(
    "--log-requests/--no-log-requests", default=False, show_default=True, help="A line for each request; no text of it."
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds that running requests get after SIGTERM.",
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(PARSERS),
    default="auto",
    show_default=True,
    help="How the model writes calls of tools; auto: as its chat template says.",
)
@engine_options
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    more_models: Sequence[str],
    host: str,
    port: int,
    names: Sequence[str],
    api_key: str | None,
    ssl_certfile: str | None,
    ssl_keyfile: str | None,
    origins: Sequence[str],
    max_concurrent_requests: int,
    max_request_bytes: int,
    max_answer_entries: int,
    model_memory: str | None,
    log_requests: bool,
    shutdown_timeout: float,
    tool_call_parser: str,
    **options: Any,
) -> None:
    """Serve MODEL over HTTP, as clients of OpenAI's API expect it. Engine arguments go for every model."""
    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        allowed_origins=tuple(origins),
        max_concurrent_requests=max_concurrent_requests,
        max_request_bytes=max_request_bytes,
        max_answer_entries=max_answer_entries,
        model_memory=None if model_memory is None else parse_bytes(model_memory),
        log_requests=log_requests,
        shutdown_timeout=shutdown_timeout,
        tool_call_parser=tool_call_parser,
    )
    references = [*([] if model is None else [model]), *more_models]
    sources = model_sources(references, names, engine_kwargs_from(ctx, options))
    with interrupts_wait():
        from modelbay_server.models import resolve_models
        from modelbay_server.serve import serve

    serve(settings, resolve_models(sources, settings.model_memory))
