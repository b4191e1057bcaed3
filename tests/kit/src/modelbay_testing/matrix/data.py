"""The matrix as data: the file that the Transformers backend ships, and the page made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from modelbay_testing.matrix.attempt import Outcome

#: Fewer matches than this are a regression whatever else a run says.
AT_LEAST = {"generate": 130, "embed": 30, "classify": 60, "image-text": 45, "audio-text": 5}
#: The same for matches on two ranks and in two stages.
ON_RANKS_AT_LEAST = 150
_INTRODUCTION = """\
# Supported models

<!-- Written by `make matrix`. Do not edit. -->

Models run on a native implementation, where a plugin has one, or on Transformers' own model code with Modelbay's
attention, cache and batching (`model_impl="transformers"`; `auto` takes it where there is no native one).

For the latter, every architecture of Transformers {version} was made tiny with random weights and run in float32: a
batch of mixed lengths, prompts in chunks, then token by token through the cache. It matches if no logit (of an encoder:
no hidden state; of a classifier: no logit of a class) differs from Transformers' own forward by more than 1e-4, or by
1e-5 of the largest value where that is more. What does not match is refused before weights are loaded, for the reason
given here. `modelbay list-archs --all` shows the same list; `modelbay explain MODEL` probes the model at hand, with its
own config.

Models for images and audio were given random inputs in the form that their processors give (pixels, patches, spectra),
in a batch with text; seven families also run with their own processor on real images and sounds
(`backends/transformers/tests/test_media.py`). Their language model is served as above; their towers run on
Transformers' own code, one image or sound at a time.

What matches was run once more on two ranks that share its layers (tensor parallel), and as two stages (pipeline): "yes"
where the same holds, else the reason for which it is refused, before weights are loaded too.

Custom models that a repository brings are checked in the same way when they are loaded: see
[Run a custom model](how-to/custom-models.md).
"""
_TITLES = {
    "generate": "Text generation",
    "embed": "Text encoders (hidden states, embedding)",
    "classify": "Sequence classification and reward models",
    "image-text": "Images and text",
    "audio-text": "Audio and text",
}


def to_data(outcomes: Iterable[Outcome], transformers: str) -> dict[str, Any]:
    """What is written to ``supported.json``."""
    models = sorted((outcome.to_dict() for outcome in outcomes), key=lambda m: (m["task"], m["model_type"]))
    return {"transformers": transformers, "models": models}


def write_data(path: Path, data: dict[str, Any]) -> None:
    """One model a line, so that a change of one is a change of a line."""
    lines = ",\n".join("  " + json.dumps(model, ensure_ascii=False) for model in data["models"])
    text = f'{{\n "transformers": {json.dumps(data["transformers"])},\n "models": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def counts(data: dict[str, Any]) -> dict[tuple[str, str], int]:
    """(task, outcome) -> how many."""
    found: dict[tuple[str, str], int] = {}
    for model in data["models"]:
        key = (model["task"], model["outcome"])
        found[key] = found.get(key, 0) + 1
    return found


def render(data: dict[str, Any], native: Sequence[Any]) -> str:
    """docs/supported_models.md. ``native``: `modelbay.architectures()` of the distributions of this project."""
    lines = _INTRODUCTION.format(version=data["transformers"]).splitlines()
    for task, title in _TITLES.items():
        models = [model for model in data["models"] if model["task"] == task]
        matching = [model for model in models if model["outcome"] == "matches"]
        others = [model for model in models if model["outcome"] != "matches"]
        lines += [
            "",
            f"## {title}",
            "",
            f"{len(matching)} of {len(models)} architectures of Transformers run and match.",
        ]
        lines += _native_table([arch for arch in native if task in arch.tasks])
        lines += _matching_table(matching)
        lines += [
            "",
            f"### Not served ({title.lower()})",
            "",
            "| Model type | Architecture | Reason |",
            "| --- | --- | --- |",
        ]
        lines += [f"| {m['model_type']} | {m['architecture']} | {_cell(m['reason'])} |" for m in others]
    return "\n".join(lines) + "\n"


def _native_table(native: Sequence[Any]) -> list[str]:
    if not native:
        return []
    lines = ["", "### Native", "", "| Model type | Architecture | Plugin | Examples |", "| --- | --- | --- | --- |"]
    for arch in native:
        examples = ", ".join(f"`{name}`" for name in arch.examples)
        lines.append(f"| {', '.join(arch.model_types)} | {arch.name} | {arch.owner.distribution} | {examples} |")
    return lines


def _matching_table(models: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["", "### On Transformers' model code", ""]
    ranks = any("tp" in model for model in models)
    lines += [
        f"| Model type | Architecture | Example | {'Tensor parallel | Pipeline | ' * ranks}Note |",
        f"| --- | --- | --- | {'--- | --- | ' * ranks}--- |",
    ]
    for model in models:
        example = f"`{model['example']}`" if "example" in model else ""
        cells = [model["model_type"], model["architecture"], example]
        cells += [_on_ranks(model.get(field, "")) for field in ("tp", "pp") if ranks]
        lines.append(f"| {' | '.join([*cells, model.get('note', '')])} |")
    return lines


def _on_ranks(answer: str) -> str:
    return "yes" if answer == "matches" else _cell(answer and f"no: {answer}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
