"""``python -m modelbay_testing.features``: rewrite docs/features.md from the table."""

from __future__ import annotations

from modelbay_testing.features.page import PAGE, render

if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
