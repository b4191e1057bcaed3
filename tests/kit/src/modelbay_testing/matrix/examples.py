"""Well-known checkpoints, as Transformers' own documentation of a config class names them."""

from __future__ import annotations

import inspect
import re
import sys

_NAMED = re.compile(r'@auto_docstring\([^()]*?checkpoint\s*=\s*"([^"]+)"[^()]*\)\s*(?:@\w+\s*)*class (\w+)', re.S)


def example_of(model_type: str) -> str:
    """A hub id, empty if the class names none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        cls = CONFIG_MAPPING[model_type]
        source = inspect.getsource(sys.modules[cls.__module__])
    except Exception:
        return ""
    return next((checkpoint for checkpoint, name in _NAMED.findall(source) if name == cls.__name__), "")
