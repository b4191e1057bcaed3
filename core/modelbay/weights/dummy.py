"""Load format ``dummy``: no files; every parameter gets finite values that depend on its name and the seed alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelbay.weights.formats import Index, TensorEntry

if TYPE_CHECKING:
    import torch

    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles

FILE = "(none: load_format=dummy)"
_BIAS_SCALE = 0.02


class Dummy:
    """The load format."""

    def select(self, files: ModelFiles) -> tuple[str, ...]:
        return ()

    def open(self, files: ModelFiles, config: ModelConfig, args: EngineArgs) -> DummySource:
        return DummySource(args.seed)


class DummySource:
    """A checkpoint made up for the module at hand: the loader tells it what is expected, then reads it like any other.

    Since the whole tensor follows from (seed, name), ranks that hold slices of it agree.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._entries: dict[str, TensorEntry] = {}

    def expect(self, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Hold a tensor for each name; values are (whole shape, torch dtype name)."""
        self._entries = {name: TensorEntry(name, shape, dtype, FILE, 0) for name, (shape, dtype) in tensors.items()}

    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        entry = self._entries[name]
        tensor = dummy_values(name, entry.shape, entry.dtype, self._seed)
        return tensor if index is None else tensor[index]

    def release(self, name: str) -> None:
        pass

    def __enter__(self) -> DummySource:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def dummy_values(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Values that keep activations finite: matrices normal with deviation 1/sqrt(fan-in), norms 1, biases small.

    Returns:
        A tensor of ``shape`` and ``dtype`` on CPU; integers and booleans are zero.
    """
    import torch

    target = getattr(torch, dtype)
    if not target.is_floating_point:
        return torch.zeros(shape, dtype=target)
    if len(shape) < 2 and name.endswith("weight"):
        return torch.ones(shape).to(target)
    # The CPU generator takes 32 bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    scale = shape[-1] ** -0.5 if len(shape) >= 2 and shape[-1] else _BIAS_SCALE
    return torch.randn(shape, generator=generator).mul_(scale).to(target)
