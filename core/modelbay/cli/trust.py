"""``modelbay trust``: which code of model repositories was trusted, by content. Runs none of it."""

from __future__ import annotations

import difflib
import os
from dataclasses import asdict
from typing import Any

import click

from modelbay import trust_lock
from modelbay.cli.output import print_json, print_table
from modelbay.errors import TrustError, UsageError
from modelbay.trace import Trace


@click.group("trust")
def command() -> None:
    """Show and change which code of model repositories is trusted, by content."""


@command.command("add")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of the model.")
@click.option("--code-revision", help="Branch, tag or commit of the code that auto_map names.")
@click.option("--json", "as_json", is_flag=True, help="A list of objects.")
def add(model: str, revision: str | None, code_revision: str | None, as_json: bool) -> None:
    """Trust the code that MODEL names as it is now. It still runs only with --trust-remote-code."""
    from modelbay.remote_code.references import all_code
    from modelbay.source import find_repository

    trace = Trace()
    files = find_repository(model, revision=revision, trace=trace)
    found = all_code(files, code_revision, trace)
    if not found:
        raise TrustError(f"{model} names no code of its own (auto_map), so there is nothing to trust.")
    added: list[dict[str, Any]] = []
    for code, closure in found:
        new = trust_lock.add(code, closure.digests())
        entry = {"repository": trust_lock.repository_of(code), "commit": code.commit, "files": closure.digests()}
        added.append({**entry, "status": "trusted now" if new else "was trusted"})
    if as_json:
        print_json(added)
        return
    rows = [[e["repository"], e["commit"] or "-", n, d, e["status"]] for e in added for n, d in e["files"].items()]
    print_table(("repository", "commit", "file", "sha256", "status"), rows)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="A list of objects.")
def list_trusted(as_json: bool) -> None:
    """List the code that is trusted: each repository's contents, with the files and their SHA-256."""
    path = trust_lock.lock_path()
    record = trust_lock.read(path) if path else {}
    entries: list[dict[str, Any]] = [
        {"repository": name, **asdict(content)} for name, contents in record.items() for content in contents
    ]
    if as_json:
        print_json(entries)
        return
    rows = [[e["repository"], e["commit"] or "-", e["since"], n, d] for e in entries for n, d in e["files"].items()]
    print_table(("repository", "commit", "since", "file", "sha256"), rows)


@command.command("remove")
@click.argument("repository")
def remove(repository: str) -> None:
    """Forget what was trusted of REPOSITORY (a hub id or a directory, as `list` shows it)."""
    if any(map(trust_lock.remove, dict.fromkeys((repository, os.path.realpath(os.path.expanduser(repository)))))):
        click.echo(f"{repository} is no longer trusted")
        return
    path = trust_lock.lock_path()
    known = list(trust_lock.read(path)) if path else []
    near = difflib.get_close_matches(repository, known, n=1)
    raise UsageError(
        f"nothing of {repository!r} is trusted ({path}).",
        hint=f"Did you mean {near[0]!r}?" if near else "See: modelbay trust list",
    )
