"""What no rule by name can know of models with towers: sizes that depend on one another in one family."""

from __future__ import annotations

from typing import Any

MEDIA: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
}
