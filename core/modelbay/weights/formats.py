"""What a load format is: it picks files, and opens them as a lazy table of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles

#: One slice per dimension, in elements, as in ``tensor[index]``; None reads the whole tensor.
Index = tuple[slice, ...] | None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor on disk, from the header alone. ``dtype`` is a torch name ("bfloat16"); ``nbytes`` on disk.

    For quantised formats ``dtype`` and ``shape`` are those of the tensor that `WeightSource.read` returns.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes: int


class WeightSource(Protocol):
    """An open checkpoint. A context manager; nothing is read before `read`."""

    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor of the chosen files, by its name on disk, in the order in which reading them is cheapest."""

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        """The tensor (or a slice of it) on CPU; may be a view of mapped memory, valid until `release`."""

    def release(self, name: str) -> None:
        """The loader is done with this tensor for now: give its pages back. A later `read` gives the same values."""

    def __enter__(self) -> WeightSource: ...

    def __exit__(self, *exc: object) -> None: ...


class LoadFormat(Protocol):
    """What a `LoadFormatSpec.target` must be: a class without constructor arguments.

    It may have a method ``trace_files(files, selected, trace)`` too, which says what of ``files`` is left aside.
    """

    def select(self, files: ModelFiles) -> tuple[str, ...]:
        """The files this format would read, relative names, from the listing alone; empty if there are none.

        Raises:
            WeightsError: the index names a file that is absent.
        """

    def open(self, files: ModelFiles, config: ModelConfig, args: EngineArgs) -> WeightSource:
        """Fetch the selected files (progress bar) and open them.

        Raises:
            WeightsError: naming the file and the likely cause.
        """
