"""``modelbay config``: the effective settings and where each came from."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import click

from modelbay.args import EngineArgs
from modelbay.cli.output import print_json, print_table
from modelbay.settings import Settings, default_path, load_settings

#: Variables that Modelbay or the hub client reads. Values that are secrets are never shown.
_VARIABLES = (
    "MODELBAY_CONFIG",
    "MODELBAY_PLUGINS",
    "MODELBAY_PREFER",
    "MODELBAY_TRUST_LOCK",
    "MODELBAY_USE_FASTOKENS",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
)
_SECRETS = ("HF_TOKEN",)


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="A list of objects.")
def command(as_json: bool) -> None:
    """Show the effective settings, and the source of each: default, config file, or environment."""
    entries = _entries(load_settings())
    if as_json:
        print_json(entries)
    else:
        rows = [[entry["setting"], _shown(entry["value"]), entry["source"]] for entry in entries]
        print_table(("setting", "value", "source"), rows)


def _entries(settings: Settings) -> list[dict[str, Any]]:
    path = str(settings.path or default_path(os.environ))
    entries = [_entry("config file", path, "read" if settings.path else "absent")]
    for field in dataclasses.fields(EngineArgs):
        if field.name in settings.args:
            entries.append(_entry(f"args.{field.name}", settings.args[field.name], path))
        elif field.metadata["flag"]:
            entries.append(_entry(f"args.{field.name}", field.default, "default"))
    entries += [_entry(f"prefer.{name}", who.distribution, who.source) for name, who in settings.prefer.items()]
    entries += [_entry(f"model_impl.{name}", backend, path) for name, backend in settings.model_impl.items()]
    entries += [_entry(name, os.environ[name], "environment") for name in _VARIABLES if name in os.environ]
    entries += [_entry(name, "(set)", "environment") for name in _SECRETS if os.environ.get(name, "").strip()]
    return entries


def _entry(setting: str, value: Any, source: str) -> dict[str, Any]:
    return {"setting": setting, "value": value, "source": source}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
