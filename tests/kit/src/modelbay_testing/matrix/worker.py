"""One process that tries cases: names in, one line of JSON out for each. A crash is the parent's to see."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path


def main() -> None:
    # Models print; what they print is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    from modelbay_testing.matrix.attempt import attempt
    from modelbay_testing.matrix.cases import all_cases

    torch.set_num_threads(1)
    _quiet()
    cases = {case.name: case for case in all_cases()}
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            outcome = attempt(cases[line.strip()], Path(folder))
        answers.write(json.dumps(outcome.to_dict()) + "\n")


def _quiet() -> None:
    """For this process alone: hundreds of models have much to say that nobody reads."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("modelbay").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
