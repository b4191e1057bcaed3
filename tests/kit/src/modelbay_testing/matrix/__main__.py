"""``python -m modelbay_testing.matrix``: run the matrix, rewrite its data and its page, and say what changed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from modelbay_testing.matrix.cases import all_cases
from modelbay_testing.matrix.data import counts, render, to_data, write_data
from modelbay_testing.matrix.ranks import WRONG, keep_ranks, matching_cases, run_on_ranks
from modelbay_testing.matrix.run import run_cases

ROOT = Path.cwd()
DATA = Path("backends/transformers/src/modelbay_transformers/supported.json")
PAGE = Path("docs/supported_models.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these (generate/llama, or llama); nothing is written then")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ranks", action="store_true", help="those that match, on two ranks and in two stages")
    parser.add_argument("--page", action="store_true", help="only write the page from the data")
    args = parser.parse_args()
    if args.ranks:
        return _on_ranks(set(args.names), args.workers)
    if not args.page:
        wanted = set(args.names)
        cases = [case for case in all_cases() if not wanted or wanted & {case.name, case.model_type}]
        outcomes = []
        for outcome in run_cases(cases, args.workers):
            outcomes.append(outcome)
            print(f"{outcome.outcome:8} {outcome.task}/{outcome.model_type}  {outcome.reason}", flush=True)
        if wanted:
            return 0
        lost = _write(outcomes)
        if lost:
            print(f"\nlost: {', '.join(lost)}", file=sys.stderr)
            return 1
    write_page()
    return 0


def _on_ranks(wanted: set[str], workers: int) -> int:
    """Try what matches in one process on ranks, and add what is found to the data (as it comes, each by itself)."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    cases = matching_cases(data, all_cases())
    cases = [case for case in cases if not wanted or wanted & {case.name, case.model_type}]
    wrong = []
    for case, found in run_on_ranks(cases, workers):
        print(f"{case.name}  {', '.join(f'{field}: {answer}' for field, answer in found.items())}", flush=True)
        data = json.loads(DATA.read_text(encoding="utf-8"))
        for model in data["models"]:
            if (model["task"], model["model_type"]) == (case.task, case.model_type):
                model.update(found)
        write_data(DATA, data)
        wrong += [case.name for answer in found.values() if answer.startswith(WRONG)]
    write_page()
    if wrong:
        print(f"\nwrong: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _write(outcomes: list) -> list[str]:
    """Write the data; returns what matched before and does not now."""
    from importlib.metadata import version

    data = to_data(outcomes, version("transformers"))
    before = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"models": []}
    keep_ranks(data, before)
    write_data(DATA, data)
    print(*(f"{task} {outcome}: {count}" for (task, outcome), count in sorted(counts(data).items())), sep="\n")
    matching = {(m["task"], m["model_type"]) for m in data["models"] if m["outcome"] == "matches"}
    was = {(m["task"], m["model_type"]) for m in before["models"] if m["outcome"] == "matches"}
    return sorted("/".join(key) for key in was - matching)


def write_page() -> None:
    PAGE.write_text(render(json.loads(DATA.read_text(encoding="utf-8")), first_party()), encoding="utf-8")


def first_party() -> list:
    """The native architectures of this project's own distributions."""
    from modelbay import architectures

    return [arch for arch in architectures() if arch.owner.distribution.startswith("modelbay-")]


if __name__ == "__main__":
    sys.exit(main())
