"""What a request asks for. Names and defaults as in vLLM."""

from __future__ import annotations
