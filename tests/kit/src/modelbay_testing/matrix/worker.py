"""One process that tries cases: names in, one line of JSON out for each. A crash is the parent's to see."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    # Models print; what they print is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    from modelbay_testing.matrix.attempt import attempt
    from modelbay_testing.matrix.cases import all_cases
    from modelbay_testing.matrix.ranks import PREFIX, attempt_ranks

    torch.set_num_threads(1)
    _quiet()
    cases = {case.name: case for case in all_cases()}
    for line in sys.stdin:
        name = line.strip()
        with tempfile.TemporaryDirectory() as folder:
            if name.startswith(PREFIX):
                found: dict[str, Any] = attempt_ranks(cases[name.removeprefix(PREFIX)], Path(folder))
            else:
                found = attempt(cases[name], Path(folder)).to_dict()
        answers.write(json.dumps(found) + "\n")


def _quiet() -> None:
    """For this process alone: hundreds of models have much to say that nobody reads."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("modelbay").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
