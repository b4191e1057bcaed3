"""The map in the README names the files that there are."""

from __future__ import annotations

import re
from pathlib import Path

MEMBER = Path(__file__).parents[1]
#: Every member has them; they are explained in docs/architecture.md.
EVERYWHERE = {"__init__", "plugin"}


def test_the_map_of_the_code_names_every_file_and_no_other() -> None:
    readme = (MEMBER / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    named = set(re.findall(r"`(\w+)`", "\n".join(rows)))
    files = {path.stem for path in (MEMBER / "src/modelbay_transformers").glob("*.py")} - EVERYWHERE
    assert named == files
