"""What sentence-transformers does to a pooled vector: its modules Dense, LayerNorm, Normalize, and a repository's own.

Legend: B sequences, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from modelbay.errors import ConfigError, RemoteCodeError, WeightsError, one_line
from modelbay.pooling import Stage
from modelbay.pooling.names import activation_name
from modelbay.pooling.values import boolean, positive
from modelbay.source import ModelFiles
from modelbay.weights.choose import choose_format

if TYPE_CHECKING:
    from modelbay.resolve import Resolution

#: Name (as in `modelbay.pooling.names`) -> the function, over the last dimension.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
}
#: Far beyond any vector, and products of two are still numbers of bytes.
_LARGEST = 1 << 24
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Checked where the modules are read: they are about the sentence_embedding.
_NAMES = {"module_input_name", "module_output_name"}
_DENSE_KEYS = {"in_features", "out_features", "bias", "activation_function", "use_residual"} | _NAMES
_LAYER_NORM_KEYS = {"dimension"} | _NAMES


def load_stages(resolution: Resolution, device: torch.device) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The stages of a resolution's pooling, float32, on ``device``: each [B, D] -> [B, D'].

    Raises:
        ConfigError: a config that says what is not served.
        WeightsError: weights that are absent, damaged, or of other shapes.
        TrustError, RemoteCodeError: a module of the repository that may not run, or failed.
    """
    made = []
    for stage in resolution.pooling.stages if resolution.pooling else ():
        made.append(_MAKERS[stage.kind](stage, resolution, device))
        resolution.trace.decide("weights", f"pooling module {stage.folder}", stage.kind, "modules.json")
    return made


class Dense(nn.Module):
    """A linear layer, its activation, and with ``use_residual`` its input (projected if the sizes differ) added."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        config, where = _checked(stage, _DENSE_KEYS)
        inputs, outputs = (_size(config, key, where) for key in ("in_features", "out_features"))
        self.linear = nn.Linear(inputs, outputs, bias=boolean(config, "bias", True, where))
        said = config.get("activation_function")
        self.activation = ACTIVATIONS["tanh" if said is None else activation_name(said, where)]
        self.residual: nn.Linear | None = None
        self.adds_input = boolean(config, "use_residual", False, where)
        if self.adds_input and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, in] -> [B, out]."""
        out = self.activation(self.linear(x))
        if self.adds_input:
            out = out + (x if self.residual is None else self.residual(x))
        return out


class LayerNorm(nn.Module):
    """A layer norm over the whole vector."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        config, where = _checked(stage, _LAYER_NORM_KEYS)
        self.norm = nn.LayerNorm(_size(config, "dimension", where))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, D] -> [B, D]."""
        return self.norm(x)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """[B, D] -> [B, D] of length 1; a vector of zeros stays one."""
    return F.normalize(x, p=2, dim=-1)


def _make(kind: type[nn.Module]) -> Callable[[Stage, Resolution, torch.device], nn.Module]:
    def make(stage: Stage, resolution: Resolution, device: torch.device) -> nn.Module:
        with torch.device("meta"):
            module = kind(stage)
        _fill(module, stage, resolution)
        return module.to(device).eval()

    return make


def _fill(module: nn.Module, stage: Stage, resolution: Resolution) -> None:
    """Every parameter from the stage's own file, which holds nothing else."""
    files = resolution.files
    name = next((name for name in _WEIGHTS if files.has(f"{stage.folder}/{name}")), None)
    if name is None:
        raise WeightsError(f"the pooling module {stage.folder} has no weights: looked for {', '.join(_WEIGHTS)}.")
    [path] = files.fetch([f"{stage.folder}/{name}"])
    folder = ModelFiles(str(path.parent), "local", path.parent, (name,))
    _, load_format = choose_format("auto", folder, resolution.plugins, resolution.trace)
    with load_format.open(folder, resolution.config, resolution.args.replace(load_format="auto")) as source:
        entries = source.entries()
        expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        found = {key: tuple(entry.shape) for key, entry in entries.items()}
        if found != expected:
            raise WeightsError(f"{stage.folder}/{name} holds {found}; its config makes it {expected}.")
        state = {key: source.read(key).to(torch.float32, copy=True) for key in entries}
    module.load_state_dict(state, assign=True)
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def _normalize(stage: Stage, resolution: Resolution, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return normalized


def _remote(stage: Stage, resolution: Resolution, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A class of the repository, behind the gate; it has sentence-transformers' ``load`` and ``forward``."""
    from modelbay.trust import load_remote_class

    args = resolution.args
    found = load_remote_class(
        stage.reference, resolution.files, trusted=args.trust_remote_code, code_revision=args.code_revision,
        what="a module of modules.json", trace=resolution.trace,
    )  # fmt: skip
    inside = [name for name in resolution.files.names if name.startswith(f"{stage.folder}/")]
    resolution.files.fetch(inside)
    try:
        module = found.load(str(resolution.files.root / stage.folder)) if inside else found()
        module = module.to(device).eval()
    except Exception as error:
        kind = type(error).__name__
        raise RemoteCodeError(f"{stage.reference} raised {kind} while it was loaded: {one_line(error)}.") from error
    return lambda x: module.forward({"sentence_embedding": x})["sentence_embedding"]


def _checked(stage: Stage, known: set[str]) -> tuple[Mapping[str, Any], str]:
    """A stage's config, in which nothing is unknown, and where it stands."""
    where = f"{stage.folder}/config.json"
    unknown = sorted(set(stage.config) - known)
    if unknown:
        raise ConfigError(f"{where} has {', '.join(unknown)}, which is not known here.")
    return stage.config, where


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    size = positive(config, key, "size", where)
    if size is None:
        raise ConfigError(f"{where} has no {key}.")
    if size > _LARGEST:
        raise ConfigError(f"{where} has {key} {size}, which is no size of a vector.")
    return size


_MAKERS: Mapping[str, Callable[[Stage, Any, torch.device], Callable[[torch.Tensor], torch.Tensor]]] = {
    "dense": _make(Dense),
    "layer_norm": _make(LayerNorm),
    "normalize": _normalize,
    "remote": _remote,
}
