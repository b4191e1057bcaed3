"""``modelbay explain MODEL``: the trace of the real thing, without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from modelbay.cli.interrupt import interrupts_wait
from modelbay.cli.options import engine_kwargs_from, engine_options
from modelbay.cli.output import StyledLine, print_json, print_lines
from modelbay.errors import ConfigError, ModelbayError, SourceError, WeightsError
from modelbay.resolve import Resolution, engine_args, resolve_args
from modelbay.settings import load_settings
from modelbay.specs import load_target
from modelbay.trace import STAGES, Decision, Trace

#: The stages that explain walks through; those without a decision are undecided.
_HALLWAY = ("source", "config", "architectures", "backends", "build", "plan", "kernels")


@click.command("explain")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="The same as data.")
@click.option("--no-build", is_flag=True, help="Stop at the resolution: do not build the module on the meta device.")
@engine_options
@click.pass_context
def command(ctx: click.Context, model: str, as_json: bool, no_build: bool, **options: Any) -> None:
    """Explain what would run for MODEL, and why: every decision, its source, what was rejected. Loads no weights."""
    trace = Trace()
    resolution: Resolution | None = None
    failure: Exception | None = None
    try:
        settings = load_settings()
        args = engine_args(model, engine_kwargs_from(ctx, options), settings, trace)
        resolution = resolve_args(args, trace=trace, settings=settings)
        if not no_build:
            with interrupts_wait():
                _tokenizer(resolution)
                _weights(resolution)
                dry_run(resolution)
    except Exception as error:  # shown after the trace so far, then raised again
        failure = error
    undecided = _undecided(trace)
    if as_json:
        print_json(_to_dict(model, trace, resolution, undecided, failure))
    else:
        print_lines(_render(model, trace, resolution, undecided))
    if failure is not None:
        raise failure


def dry_run(resolution: Resolution) -> None:
    """Let the chosen backend walk build, plan and kernels on the meta device."""
    spec = resolution.plugins.require("modeling_backends", resolution.backend, "modelling backend").value
    load_target(spec.target)().dry_run(resolution)


def _tokenizer(resolution: Resolution) -> None:
    """Decide how texts become tokens. What a model without one cannot do is said, and ends no explanation."""
    from modelbay.tokenizer import load_tokenizer

    args, trace = resolution.args, resolution.trace
    try:
        load_tokenizer(resolution.files, resolution.config, resolution.plugins, args, trace)
    except (ModelbayError, ImportError) as error:
        trace.warn("tokenizer", "tokenizer", "cannot be loaded", str(error))


def _weights(resolution: Resolution) -> None:
    """Decide which files would be read. That there are none is said, and ends no explanation."""
    from modelbay.weights.choose import choose_format

    args, trace = resolution.args, resolution.trace
    try:
        choose_format(args.load_format, resolution.files, resolution.plugins, trace)
    except (WeightsError, ConfigError, SourceError) as error:
        trace.warn("weights", "weights", "cannot be loaded", str(error))


def _undecided(trace: Trace) -> list[str]:
    decided = {decision.stage for decision in trace}
    return [stage for stage in _HALLWAY if stage not in decided]


def _summary(resolution: Resolution | None) -> dict[str, Any]:
    if resolution is None:
        return {}
    return {
        "commit": resolution.files.commit,
        "task": resolution.task,
        "architecture": resolution.architecture,
        "served_by": resolution.arch.name if resolution.arch else None,
        "owner": str(resolution.owner) if resolution.owner else None,
        "backend": resolution.backend,
    }


def _to_dict(
    model: str, trace: Trace, resolution: Resolution | None, undecided: list[str], failure: Exception | None
) -> dict[str, Any]:
    error = None if failure is None else {"type": type(failure).__name__, "message": str(failure)}
    summary = _summary(resolution) or None
    return {"model": model, "resolution": summary, "trace": trace.to_list(), "undecided": undecided, "error": error}


def _render(model: str, trace: Trace, resolution: Resolution | None, undecided: list[str]) -> Iterator[StyledLine]:
    yield [(model, "bold")]
    summary = _summary(resolution)
    if summary.get("served_by") == summary.get("architecture"):
        summary.pop("served_by", None)
    for name, value in summary.items():
        if value is not None:
            yield [(f"  {name.replace('_', ' ')}: ", "dim"), (str(value), "")]
    for stage in STAGES:
        decisions = [decision for decision in trace if decision.stage == stage]
        if decisions:
            yield []
            yield [(stage, "bold cyan")]
        for decision in decisions:
            yield from _render_decision(decision)
    if undecided:
        yield []
        yield [(f"undecided: {', '.join(undecided)}", "yellow")]


def _render_decision(decision: Decision) -> Iterator[StyledLine]:
    warning = decision.level == "warning"
    mark, style = ("! ", "yellow") if warning else ("  ", "")
    yield [(mark, style), (f"{decision.question}: ", "dim"), (_shown(decision.answer), style), _source(decision)]
    for rejected in decision.rejected:
        yield [("    not ", "dim"), (rejected.option, ""), (f": {rejected.reason}" if rejected.reason else "", "dim")]


def _source(decision: Decision) -> tuple[str, str]:
    return (f"  [{decision.source}]", "dim")


def _shown(answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list | tuple) and all(isinstance(item, str) for item in answer):
        return ", ".join(answer) or "none"
    if isinstance(answer, dict) and all(isinstance(value, str | int | float) for value in answer.values()):
        return ", ".join(f"{key}={value}" for key, value in answer.items()) or "none"
    return json.dumps(answer, ensure_ascii=False, default=str)
