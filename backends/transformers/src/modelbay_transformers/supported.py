"""What the matrix of all architectures found, as records: which of Transformers' models were run and match."""

from __future__ import annotations

import json
from importlib import resources

from modelbay.specs import ArchSpec

_FILE = "supported.json"
#: What the matrix calls a task -> the task that is resolved, and what the model reads.
_MODALITIES = {"image-text": ("text", "image"), "audio-text": ("text", "audio")}


def supported() -> list[ArchSpec]:
    """One record for each architecture and task, with the model types that it serves."""
    data = json.loads(resources.files("modelbay_transformers").joinpath(_FILE).read_text(encoding="utf-8"))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for model in data["models"]:
        if model["outcome"] == "matches":
            found.setdefault((model["architecture"], model["task"]), {})[model["model_type"]] = model.get("example", "")
    return [
        ArchSpec(
            name=name,
            target="",
            model_types=tuple(types),
            tasks=("generate",) if task in _MODALITIES else (task,),
            modalities=_MODALITIES.get(task, ("text",)),
            attention=(),
            examples=tuple(dict.fromkeys(example for example in types.values() if example)),
        )
        for (name, task), types in sorted(found.items())
    ]
