"""Repairs of configs of Transformers' models: keys that mean something else than they say."""

from __future__ import annotations

from typing import Any


def falcon_heads(config: dict[str, Any]) -> str | None:
    """Falcon's second architecture counts its KV heads, and ignores ``multi_query``, which is true by default."""
    if not config.get("new_decoder_architecture") or config.get("multi_query") is False:
        return None
    config["multi_query"] = False
    return "multi_query false: new_decoder_architecture ignores it"
