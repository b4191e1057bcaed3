"""Which load format reads these files (W1)."""

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
        WeightsError: no format finds any weights.
    """
    if load_format != "auto":
        spec: LoadFormatSpec = plugins.named("load_formats", load_format, "load format").value
        trace.decide("weights", "load format", spec.name, trace.argument("load_format"))
        return spec, load_target(spec.target)()
    rejected: list[Rejected] = []
    for name in _auto_names(plugins):
        owned = plugins.get("load_formats", name)
        if owned is None:
            continue
        format: LoadFormat = load_target(owned.value.target)()
        selected = format.select(files)
        if selected:
            trace.decide("weights", "load format", name, f"found {shorten(selected, 3)}", rejected=tuple(rejected))
            return owned.value, format
        rejected.append(Rejected(name, f"no {' or '.join(owned.value.suffixes) or 'such'} files"))
    raise WeightsError(
        f"{files.reference} has no weights: looked for {', '.join(item.option for item in rejected)};"
        f" found {shorten(sorted(files.names)) or 'no files'}.",
        hint="Use load_format=dummy to run with made-up weights.",
    )


def _auto_names(plugins: Plugins) -> list[str]:
    orders: dict[str, int] = {}
    for owned in plugins.all("load_formats"):
        if owned.value.auto is not None:
            orders[owned.value.name] = min(owned.value.auto, orders.get(owned.value.name, owned.value.auto))
    return sorted(orders, key=lambda name: (orders[name], name))
