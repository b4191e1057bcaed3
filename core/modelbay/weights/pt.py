"""Load format ``pt``: PyTorch's own files, read with ``weights_only=True`` and mapped where their layout allows."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelbay.errors import WeightsError
from modelbay.weights.diagnose import damaged, likely_cause
from modelbay.weights.formats import Index, TensorEntry
from modelbay.weights.index import SHARD, FileNames, check_index, merge_entries, select_files, trace_files

if TYPE_CHECKING:
    import torch

    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

NAMES = FileNames(
    indexes=("pytorch_model.bin.index.json",),
    whole="pytorch_model.bin",
    patterns=(
        ("pytorch_model.bin", f"pytorch_model{SHARD}.bin"),
        ("pytorch_model*.bin",),
        ("model.bin",),
        ("*.bin",),
        ("model.pt",),
        ("*.pt",),
        ("model.pth",),
        ("*.pth",),
    ),
)


class PyTorchBin:
    """The load format."""

    def select(self, files: ModelFiles) -> tuple[str, ...]:
        return select_files(files, NAMES)

    def trace_files(self, files: ModelFiles, selected: tuple[str, ...], trace: Trace) -> None:
        trace_files(files, NAMES, selected, trace)

    def open(self, files: ModelFiles, config: ModelConfig, args: EngineArgs) -> PyTorchSource:
        names = self.select(files)
        if not names:
            raise WeightsError(f"{files.reference} has no .bin, .pt or .pth weight files.")
        source = PyTorchSource(dict(zip(names, files.fetch(names), strict=True)))
        check_index(files, NAMES.indexes, {name: entry.file for name, entry in source.entries().items()})
        return source


class PyTorchSource:
    """Open PyTorch files. Only the pickles are read on opening; tensors are views of the mapped files.

    Files in PyTorch's format from before 1.6, and compressed ones, cannot be mapped and are read whole.

    Args:
        paths: relative name to path.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        loaded = {file: load_state_dict(path) for file, path in paths.items()}
        self._mapped = {file: _mapped_ranges(path) for file, path in paths.items()}
        self._tensors: dict[str, tuple[str, torch.Tensor]] = {}
        ordered = (
            (file, sorted(((name, file, tensor) for name, tensor in state.items()), key=lambda item: _address(item[2])))
            for file, state in loaded.items()
        )
        self._tensors = {
            name: (file, tensor) for name, (_, file, tensor) in merge_entries(ordered, lambda item: item[0]).items()
        }
        self._entries = {
            name: TensorEntry(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                file,
                tensor.numel() * tensor.itemsize,
            )
            for name, (file, tensor) in self._tensors.items()
        }

    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        tensor = self._tensors[name][1]
        return tensor if index is None else tensor[index]

    def release(self, name: str) -> None:
        file, tensor = self._tensors[name]
        if tensor.is_contiguous():
            _give_back(_address(tensor), tensor.numel() * tensor.itemsize, self._mapped[file])

    def __enter__(self) -> PyTorchSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tensors.clear()


def load_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, by name.

    Raises:
        WeightsError: the file is damaged, wants to run code, or is not a mapping of names to tensors.
    """
    import torch

    try:
        with warnings.catch_warnings():  # torch tells how old the file is; whether it can be read is what counts
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_mappable(path))
    except pickle.UnpicklingError as error:
        if _asks_for_code(error) and likely_cause(path) is None:
            raise WeightsError(
                f"weight file {path} is refused: its pickle holds more than tensors ({_global_of(error)}).",
                hint="Reading it could run code. Ask its authors for safetensors, or convert it where you trust it.",
            ) from error
        raise damaged(path, "it is not a PyTorch file, or is truncated", "Download it again.") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise damaged(path, f"it is truncated or damaged ({_first_line(error)})", "Download it again.") from error
    return _tensors_of(content, path)


def _tensors_of(content: Any, path: Path) -> dict[str, torch.Tensor]:
    """The state dict itself, or the one under ``state_dict``; anything else is an error."""
    import torch

    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise WeightsError(f"weight file {path} holds a {type(content).__name__}, not a mapping of names to tensors.")
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise WeightsError(f"weight file {path} is not a state dict: {name!r} is no name of a tensor.")
        if not isinstance(tensor, torch.Tensor):
            raise WeightsError(
                f"weight file {path} is not a state dict: {name!r} is a {type(tensor).__name__}, not a tensor."
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise WeightsError(f"weight file {path}: tensor {name!r} is not a plain dense tensor.")
    return {name: tensor.detach() for name, tensor in content.items()}


def _mappable(path: Path) -> bool:
    """Whether torch may map the file: a zip archive whose members are stored as they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
    except (zipfile.BadZipFile, OSError):
        return False


def _asks_for_code(error: pickle.UnpicklingError) -> bool:
    text = str(error).lower()
    return any(f"unsupported {what}" in text for what in ("global", "class"))


def _global_of(error: BaseException) -> str:
    """The part of torch's long advice that says what the pickle asked for."""
    for line in str(error).splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.split(" was not an allowed")[0].split(" whose module")[0].split("nsupported ")[-1].strip()
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr())


def _mapped_ranges(path: Path) -> tuple[tuple[int, int], ...]:
    """Address ranges where this process has the file mapped (Linux; elsewhere nothing is given back early)."""
    if sys.platform != "linux":
        return ()
    real, ranges = str(path.resolve()), []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] == real:
                start, _, end = fields[0].partition("-")
                ranges.append((int(start, 16), int(end, 16)))
    return tuple(ranges)


def _give_back(address: int, nbytes: int, mapped: tuple[tuple[int, int], ...]) -> None:
    """Drop the pages of a tensor from memory, only where they are pages of its file: the next touch reads them again.

    The check matters. On memory that backs no file the same call would fill the tensor with zeros.
    """
    if not nbytes or not any(start <= address and address + nbytes <= end for start, end in mapped):
        return
    start = address - address % mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), mmap.MADV_DONTNEED)
