"""Weights alone: state dicts on disk, and modules filled from them by the runtime's loader, without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

MODEL_FILE = "model.safetensors"


def save_state(state: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """A folder with these tensors, each with memory of its own; returns it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({name: value.detach().contiguous().clone() for name, value in state.items()}, folder / MODEL_FILE)
    return folder


def save_model(model: Any, folder: Path) -> Path:
    """A folder with what ``save_pretrained`` writes of the weights: the original names and layout of the family."""
    model.save_pretrained(folder, max_shard_size="1GB")
    for file in folder.iterdir():
        if file.name != MODEL_FILE:
            file.unlink()
    return folder


def saved_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / MODEL_FILE, "pt") as file:
        return set(file.keys())


def random_model(model_class: Any, config: Any) -> Any:
    """Transformers' own instance, float32, every parameter random; buffers as they are built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
    return model


def load_module(module: nn.Module, folder: Path, *, tie: bool = False) -> Any:
    """Fill ``module`` as the engine would, and return the LoadReport.

    Args:
        tie: what the config says of ``tie_word_embeddings``.
    """
    from modelbay.args import EngineArgs
    from modelbay.plugins import load_plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace
    from modelbay_runtime.loading import load_weights

    facts = SimpleNamespace(
        tie_word_embeddings=tie, num_layers=None, sources={}, quantization=None, get=lambda key, default=None: default
    )
    names = tuple(sorted(path.name for path in folder.iterdir()))
    resolution: Any = SimpleNamespace(
        args=EngineArgs.create(str(folder)),
        plugins=load_plugins([]),
        files=ModelFiles(str(folder), "local", folder, names),
        config=facts,
        arch=None,
        trace=Trace(),
    )
    return load_weights(module, resolution, device="cpu")


def differing(module: nn.Module, state: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the module's tensors that ``state`` does not have with exactly these values."""
    found = module.state_dict()
    return [name for name in found if name not in state or not torch.equal(found[name], state[name])]
