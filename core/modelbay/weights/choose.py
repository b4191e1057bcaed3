"""Which load format reads which of these files (W1, W2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelbay.errors import WeightsError
from modelbay.specs import LoadFormatSpec, load_target
from modelbay.trace import Rejected
from modelbay.weights.index import shorten

if TYPE_CHECKING:
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace
    from modelbay.weights.formats import LoadFormat


def choose_format(
    load_format: str, files: ModelFiles, plugins: Plugins, trace: Trace
) -> tuple[LoadFormatSpec, LoadFormat]:
    """The format named, or with ``auto`` the first (lowest `LoadFormatSpec.auto`) that finds files.

    A format that is named is used even where another would find files: it never falls back.

    Raises:
        UsageError: no plugin offers the name; PluginError: one that failed does.
        WeightsError: no format, or not the one named, finds any weights.
    """
    if load_format != "auto":
        return _named(load_format, files, plugins, trace)
    rejected: list[Rejected] = []
    for name in _auto_names(plugins):
        owned = plugins.get("load_formats", name)
        if owned is None:
            continue
        format: LoadFormat = load_target(owned.value.target)()
        selected = format.select(files)
        if selected:
            trace.decide("weights", "load format", name, f"found {shorten(selected, 3)}", rejected=tuple(rejected))
            _trace_files(format, files, selected, trace)
            return owned.value, format
        rejected.append(Rejected(name, f"no {_endings(owned.value)} files"))
    raise WeightsError(
        f"{files.reference} has no weights: looked for {', '.join(item.option for item in rejected)};"
        f" found {shorten(sorted(files.names)) or 'no files'}.",
        hint="Use load_format=dummy to run with made-up weights.",
    )


def _named(name: str, files: ModelFiles, plugins: Plugins, trace: Trace) -> tuple[LoadFormatSpec, LoadFormat]:
    spec: LoadFormatSpec = plugins.named("load_formats", name, "load format").value
    trace.decide("weights", "load format", spec.name, trace.argument("load_format"))
    format: LoadFormat = load_target(spec.target)()
    selected = format.select(files)
    if not selected and spec.suffixes:  # a format without any, as dummy, reads no files
        raise WeightsError(
            f"load_format={name!r} was asked for, and {files.reference} has no {_endings(spec)} weight files;"
            f" found {shorten(sorted(files.names)) or 'no files'}.",
            hint="Leave load_format out to read what is there.",
        )
    _trace_files(format, files, selected, trace)
    return spec, format


def _trace_files(format: LoadFormat, files: ModelFiles, selected: tuple[str, ...], trace: Trace) -> None:
    """What a format has to say of the files that it leaves aside, if it has."""
    report = getattr(format, "trace_files", None)
    if report is not None:
        report(files, selected, trace)


def _endings(spec: LoadFormatSpec) -> str:
    *first, last = spec.suffixes or ("such",)
    return f"{', '.join(first)} or {last}" if first else last


def _auto_names(plugins: Plugins) -> list[str]:
    orders: dict[str, int] = {}
    for owned in plugins.all("load_formats"):
        if owned.value.auto is not None:
            orders[owned.value.name] = min(owned.value.auto, orders.get(owned.value.name, owned.value.auto))
    return sorted(orders, key=lambda name: (orders[name], name))
