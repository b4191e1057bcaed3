"""The dtype to run in (C8)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelbay import hub
from modelbay.errors import ConfigError, UsageError, WeightsError
from modelbay.trace import Rejected

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

RUN_DTYPES = ("float32", "bfloat16", "float16")
_NAMES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_HEADER = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Dtype:
    """The dtype to run in, the checkpoint's own (None: nothing says it), and the reason for the first."""

    run: str
    checkpoint: str | None
    source: str


def resolve_dtype(
    asked: str, device: str, raw: Mapping[str, Any], text_path: tuple[str, ...], files: ModelFiles, trace: Trace
) -> Dtype:
    """Argument, else config from the outside in, else the weights' header, else float32."""
    found = _from_config(raw, text_path) or _from_header(files)
    checkpoint = found[0] if found else None
    _trace_differing(raw, checkpoint, trace)
    if asked != "auto":
        return Dtype(_run_dtype(asked), checkpoint, "argument dtype")
    if found is None:
        return Dtype("float32", None, "derived: neither config nor weights say one")
    name, source = found
    if name == "float64":
        return Dtype("float32", name, f"derived: {source} says float64, which no kernel takes")
    if name == "float32" and prefers_bfloat16(device):
        rejected = (Rejected("float32", f"{source}; give dtype=float32 to keep it"),)
        trace.decide("config", "float32 checkpoint", "bfloat16", "the device prefers bfloat16", rejected=rejected)
        return Dtype("bfloat16", name, f"derived: float32 in {source}, and the device prefers bfloat16")
    return Dtype(name, name, source)


def prefers_bfloat16(device: str) -> bool:
    """Whether a float32 model should run in bfloat16 on this device. On CPU float32 stays."""
    if device != "auto":
        return device.startswith("cuda")
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
        return False
    import torch

    return bool(torch.cuda.is_available())


def _run_dtype(asked: Any) -> str:
    name = _plain(str(asked))  # torch.float32 itself will do
    if name not in RUN_DTYPES:
        raise UsageError(f"dtype must be auto, {', '.join(RUN_DTYPES)}, got {asked!r}.")
    return name


def _plain(name: str) -> str:
    name = name.removeprefix("torch.")
    return _NAMES.get(name, name)


def _from_config(raw: Mapping[str, Any], text_path: tuple[str, ...]) -> tuple[str, str] | None:
    level: Mapping[str, Any] = raw
    for depth in range(len(text_path) + 1):
        for key in ("dtype", "torch_dtype"):
            value = level.get(key)
            if value is None or value == "auto":
                continue
            where = ".".join((*text_path[:depth], key))
            name = _plain(value) if isinstance(value, str) else value
            if name not in (*RUN_DTYPES, "float64"):
                raise ConfigError(
                    f"the config's {where} is {value!r}, which is not a dtype that models run in.",
                    hint=f"Give dtype as one of {', '.join(RUN_DTYPES)} with hf_overrides.",
                )
            return name, f"config.json ({where})"
        if depth < len(text_path):
            level = level[text_path[depth]]
    return None


def _trace_differing(raw: Mapping[str, Any], checkpoint: str | None, trace: Trace) -> None:
    """Backbones that the config gives a dtype of their own: Transformers would respect it, one dtype runs here."""
    for path, value in _nested_dtypes(raw):
        if checkpoint is not None and _plain(value) != checkpoint:
            trace.warn(
                "config", f"dtype of {path}", checkpoint, f"{path} says {value}; one dtype serves the whole model"
            )


def _nested_dtypes(level: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    for key, inner in level.items():
        if not isinstance(inner, Mapping) or key == "quantization_config":
            continue
        value = inner.get("dtype") or inner.get("torch_dtype")
        if isinstance(value, str):
            yield ".".join((*path, key)), value
        yield from _nested_dtypes(inner, (*path, key))


def _from_header(files: ModelFiles) -> tuple[str, str] | None:
    """The dtype that most bytes of the first safetensors file have, read from its header alone."""
    names = sorted(files.match("*.safetensors"))
    if not names:
        return None
    path = files.root / names[0]
    header = _read_header(path) if path.is_file() else _read_remote_header(files, names[0])
    sizes: Counter[str] = Counter()
    for entry in header.values():
        dtype = _HEADER.get(entry.get("dtype"))
        if dtype is not None:
            start, end = entry["data_offsets"]
            sizes[dtype] += end - start
    return (sizes.most_common(1)[0][0], f"header of {names[0]}") if sizes else None


def _read_header(path: Path) -> dict[str, Any]:
    """Tensor entries of a safetensors file: 8 bytes of header length (little endian), then JSON."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size)) if 0 < size <= _MAX_HEADER else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise WeightsError(
            f"{path} is not a safetensors file: its header cannot be read.",
            hint="A truncated download, or a git-lfs pointer instead of the file? Fetch it again.",
        )
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _read_remote_header(files: ModelFiles, name: str) -> dict[str, Any]:
    """The same of a file that is not downloaded yet; nothing where the hub cannot be asked."""
    if files.repo_id is None or hub.is_offline():
        return {}
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

    api = HfApi(endpoint=hub.endpoint(), token=hub.token())
    try:
        metadata = api.parse_safetensors_file_metadata(files.repo_id, name, revision=files.commit)
    except (HfHubHTTPError, NotASafetensorsRepoError, OSError):
        return {}  # downloading the weights will say what is wrong
    return {
        tensor: {"dtype": info.dtype, "data_offsets": list(info.data_offsets)}
        for tensor, info in metadata.tensors.items()
    }
