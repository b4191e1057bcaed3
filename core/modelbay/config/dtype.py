"""The dtype to run in (C8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelbay import hub
from modelbay.config.origins import Origins
from modelbay.errors import ConfigError, UsageError, WeightsError
from modelbay.trace import Rejected
from modelbay.weights.header import DTYPES, read_header

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

RUN_DTYPES = ("float32", "bfloat16", "float16")
_NAMES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_FLOATS = (*RUN_DTYPES, "float64")
#: Today's name in a config, and the former one.
_KEYS = ("dtype", "torch_dtype")
#: The value of the argument ``dtype`` that keeps each backbone's own.
BACKBONE = "backbone"


@dataclass(frozen=True, slots=True)
class Dtype:
    """The dtype to run in, the checkpoint's own (None: nothing says it), and the reason for the first.

    ``backbones``: see `ModelConfig.backbone_dtypes`.
    """

    run: str
    checkpoint: str | None
    source: str
    backbones: Mapping[str, str] = field(default_factory=dict)


def resolve_dtype(
    asked: str,
    device: str,
    raw: Mapping[str, Any],
    text_path: tuple[str, ...],
    origins: Origins,
    files: ModelFiles,
    trace: Trace,
) -> Dtype:
    """Argument, else config from the outside in, else the weights' header, else float32.

    Raises:
        UsageError: the argument is no dtype to run in.
        ConfigError: what the config says is none.
    """
    wanted = "auto" if asked in ("auto", BACKBONE) else _run_dtype(asked)
    found = _from_config(raw, text_path, origins) or _from_header(files)
    checkpoint = found[0] if found else None
    whole = _automatic(found, device, trace) if wanted == "auto" else Dtype(wanted, checkpoint, trace.argument("dtype"))
    if asked == BACKBONE:
        return _of_backbones(raw, text_path, origins, whole, trace)
    _trace_differing(raw, checkpoint, whole.run, trace)
    return whole


def _automatic(found: tuple[str, str] | None, device: str, trace: Trace) -> Dtype:
    """What the checkpoint says, where a kernel takes it and the device does not prefer another."""
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


def _of_backbones(
    raw: Mapping[str, Any], text_path: tuple[str, ...], origins: Origins, whole: Dtype, trace: Trace
) -> Dtype:
    """Each backbone in the dtype that its own config says; what says none, in that of the whole."""
    own = {
        ".".join(path): "float32" if name == "float64" else name
        for path, name in ((path, _checked(value, (*path, "dtype"))) for path, value in _nested_dtypes(raw))
    }
    if not own:
        return whole
    backbones = {"": whole.run, **own}
    trace.decide("config", "backbone dtypes", backbones, f"{BACKBONE}, by {trace.argument('dtype')}")
    for depth in range(len(text_path), 0, -1):
        text = ".".join(text_path[:depth])
        if text in own:
            source = origins.of((*text_path[:depth], _dtype_key(raw, text_path[:depth])))
            return Dtype(own[text], whole.checkpoint, f"{source}, by dtype={BACKBONE}", backbones)
    return Dtype(whole.run, whole.checkpoint, whole.source, backbones)


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
        raise UsageError(f"dtype must be auto, {BACKBONE}, {', '.join(RUN_DTYPES)}, got {asked!r}.")
    return name


def _plain(name: str) -> str:
    name = name.removeprefix("torch.")
    return _NAMES.get(name, name)


def _dtype_key(raw: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """The key under which the sub-config at ``path`` says its dtype."""
    level: Any = raw
    for key in path:
        level = level[key]
    return next(key for key in _KEYS if isinstance(level.get(key), str) and level[key] != "auto")


def _from_config(raw: Mapping[str, Any], text_path: tuple[str, ...], origins: Origins) -> tuple[str, str] | None:
    level: Mapping[str, Any] = raw
    for depth in range(len(text_path) + 1):
        for key in _KEYS:
            value = level.get(key)
            if value is not None and value != "auto":
                path = (*text_path[:depth], key)
                return _checked(value, path), origins.of(path)
        if depth < len(text_path):
            level = level[text_path[depth]]
    return None


def _checked(value: Any, path: tuple[str, ...]) -> str:
    """The dtype's name as torch has it."""
    name = _plain(value) if isinstance(value, str) else None
    if name not in _FLOATS:
        raise ConfigError(
            f"the config's {'.'.join(path)} is {value!r}, which is not a dtype that models run in.",
            hint=f"Give dtype as one of {', '.join(RUN_DTYPES)} with hf_overrides.",
        )
    return name


def _trace_differing(raw: Mapping[str, Any], checkpoint: str | None, run: str, trace: Trace) -> None:
    """Backbones that the config gives a dtype of their own: one dtype serves all of them."""
    for keys, value in _nested_dtypes(raw):
        if checkpoint is not None and _plain(value) != checkpoint:
            path = ".".join(keys)
            why = f"{path} says {value}; one dtype serves the whole model, dtype={BACKBONE} keeps each one's own"
            trace.warn("config", f"dtype of {path}", run, why)


def _nested_dtypes(level: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The sub-configs that say a dtype: the keys that lead there, and what they say."""
    for key, inner in level.items():
        if not isinstance(inner, Mapping) or key == "quantization_config":
            continue
        said = (inner.get(name) for name in _KEYS)
        value = next((value for value in said if isinstance(value, str) and value != "auto"), None)
        if value is not None:
            yield (*path, key), value
        yield from _nested_dtypes(inner, (*path, key))


def _from_header(files: ModelFiles) -> tuple[str, str] | None:
    """The dtype that most bytes of the first safetensors file have, read from its header alone."""
    name = _first_file(files)
    if name is None:
        return None
    path = files.root / name
    sizes: Counter[str] = Counter()
    for dtype, nbytes in _local_tensors(path) if path.is_file() else _remote_tensors(files, name):
        if dtype in _FLOATS:
            sizes[dtype] += nbytes
    return (sizes.most_common(1)[0][0], f"header of {name}") if sizes else None


def _first_file(files: ModelFiles) -> str | None:
    from modelbay.weights.safetensors import Safetensors

    try:
        return next(iter(Safetensors().select(files)), None)
    except WeightsError:  # files that an index names are absent: whoever loads them says so, a dummy model needs none
        return None


def _local_tensors(path: Path) -> Iterable[tuple[str, int]]:
    return ((entry.dtype, entry.nbytes) for entry in read_header(path))


def _remote_tensors(files: ModelFiles, name: str) -> Iterable[tuple[str, int]]:
    """The same of a file that is not downloaded yet; nothing where the hub cannot be asked."""
    if files.repo_id is None or hub.is_offline():
        return ()
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

    api = HfApi(endpoint=hub.endpoint(), token=hub.token())
    try:
        metadata = api.parse_safetensors_file_metadata(files.repo_id, name, revision=files.commit)
    except (HfHubHTTPError, NotASafetensorsRepoError, OSError):
        return ()  # downloading the weights will say what is wrong
    tensors = metadata.tensors.values()
    return (
        (DTYPES[info.dtype][0], info.data_offsets[1] - info.data_offsets[0]) for info in tensors if info.dtype in DTYPES
    )
