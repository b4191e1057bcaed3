"""The engine arguments: one table that `LLM(...)`, `resolve(...)` and every command line read.

Each field carries its help text; the CLI makes a flag with dashes of it, so a new argument is added in one place.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from modelbay.errors import UsageError
from modelbay.unserved import ENGINE_ARGUMENTS, refuse_known

#: What torch's stores and groups can count in milliseconds, with room.
_LONGEST_TIMEOUT_S = 1_000_000


def _arg(default: Any, help: str, *, choices: tuple[str, ...] | None = None, flag: bool = True) -> Any:
    """``flag=False`` keeps an argument out of the command line (it takes Python objects)."""
    return field(default=default, metadata={"help": help, "choices": choices, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """What decides which model runs and how.

    ``None`` always means "not said". Lengths are in tokens, memory in bytes, shares between 0 and 1.
    """

    model: str = _arg("", "Directory, file, or hub id (org/name) of the model.", flag=False)
    tokenizer: str | None = _arg(None, "Directory or hub id of the tokenizer; the model's own if not given.")
    revision: str | None = _arg(None, "Branch, tag or commit of the model.")
    tokenizer_revision: str | None = _arg(
        None, "Branch, tag or commit of the tokenizer; the model's if it is the same repository."
    )
    code_revision: str | None = _arg(
        None, "Branch, tag or commit of the code that auto_map names; the model's if it is the same repository."
    )
    tokenizer_mode: str = _arg("auto", "auto, hf, slow, fastokens, or a mode that a plugin adds.")
    trust_remote_code: bool = _arg(False, "Allow Python code from the model repository to run.")
    model_impl: str = _arg("auto", "auto, native, transformers, or a backend that a plugin adds.")
    runner: str = _arg("auto", "What the model is run for.", choices=("auto", "generate", "pooling"))
    convert: str = _arg(
        "auto", "Conversion of the architecture for the task.", choices=("auto", "none", "embed", "classify")
    )
    load_format: str = _arg("auto", "auto, safetensors, pt, dummy, or a format that a plugin adds.")
    dtype: str = _arg(
        "auto",
        "auto, backbone (each backbone of a multimodal model in the dtype that its own config says), or the dtype to "
        "run in: float32, bfloat16, float16.",
    )
    device: str = _arg("auto", "auto, cpu, cuda, or cuda:N.")
    max_model_len: int | None = _arg(None, "Longest sequence (prompt and output), in tokens.")
    hf_overrides: Mapping[str, Any] | None = _arg(None, "Config values to replace, as JSON; nested objects merge.")
    generation_config: str = _arg(
        "auto",
        "Where default sampling comes from: auto (the model), modelbay (ignore the model's file), or a directory.",
    )
    quantization: str | None = _arg(
        None,
        "Quantization method, which must be what the checkpoint says: keeps weights quantised where layers can. Not "
        "given: they are kept where a kernel set multiplies them on this device, else dequantised.",
    )
    kernels: str = _arg("auto", "Kernel set to use for every op that has it (torch, triton), or auto.")
    attention_backend: str = _arg("auto", "Kernel set to use for attention, or auto.")
    enforce_eager: bool = _arg(False, "Never compile or capture graphs.")
    pooler_config: Mapping[str, Any] | None = _arg(None, "Pooling settings, as JSON.")
    tensor_parallel_size: int = _arg(1, "Ranks that share each layer.")
    pipeline_parallel_size: int = _arg(1, "Stages the layers are split into.")
    data_parallel_size: int = _arg(1, "Replicas of the model.")
    enable_expert_parallel: bool = _arg(False, "Split experts over ranks instead of slicing each expert.")
    distributed_executor_backend: str = _arg(
        "auto",
        "Who starts the ranks: this process (mp), torchrun, a Ray cluster; auto: torchrun if it runs, else mp.",
        choices=("auto", "mp", "torchrun", "ray"),
    )
    distributed_backend: str = _arg(
        "auto", "What ranks exchange tensors over; auto: NCCL for GPUs, else gloo.", choices=("auto", "gloo", "nccl")
    )
    distributed_timeout_seconds: float = _arg(
        300.0, "Longest that one rank waits for another, in seconds; longer than any step takes."
    )
    max_num_seqs: int = _arg(128, "Most sequences in one step.")
    max_num_batched_tokens: int = _arg(2048, "Most tokens in one step.")
    gpu_memory_utilization: float = _arg(
        0.9, "Largest share of the device's (GPU) or the free (CPU) memory that weights and cache may take."
    )
    kv_cache_memory_bytes: int | None = _arg(None, "KV cache size in bytes, instead of a share.")
    block_size: int = _arg(16, "Tokens in one KV cache block.")
    enable_prefix_caching: bool = _arg(True, "Share cache blocks between requests that begin alike.")
    speculative_config: Mapping[str, Any] | None = _arg(
        None,
        'Speculative decoding, as JSON: {"method": "mtp", "num_speculative_tokens": 1} drafts with the model\'s own '
        "layer for it.",
    )
    enable_chunked_prefill: bool = _arg(True, "Split long prompts over several steps.")
    limit_mm_per_prompt: Mapping[str, Any] | None = _arg(
        None, "Most images and pieces of audio in one prompt, as JSON (image, audio); 64 of each if not given."
    )
    allowed_media_domains: Sequence[str] | None = _arg(
        None, "Hosts that images and audio may be fetched from, separated by commas; none if not given."
    )
    allowed_local_media_path: str | None = _arg(
        None, "Directory whose files requests to the server may name as images and audio; none if not given."
    )
    media_cache_bytes: int = _arg(2**28, "Memory for the encoded images and audio that are kept, in bytes.")
    seed: int = _arg(0, "Seed of everything random that a request does not seed itself.")
    plugins: Sequence[Any] | None = _arg(
        None, "Plugins to load (names or modules); all installed ones if not given.", flag=False
    )
    prefer: Mapping[str, str] | None = _arg(None, "Which distribution serves a name that two offer.", flag=False)
    locked: str | None = _arg(None, "Lock file (modelbay lock): take its commits and settings, refuse what differs.")
    strict: bool = _arg(True, "Refuse checkpoints with unknown, missing or duplicate tensors.")
    strict_plugins: bool = _arg(False, "Fail when an installed plugin fails, instead of skipping it.", flag=False)

    def __post_init__(self) -> None:
        positive = (
            "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
            "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name} must be a positive integer, got {value!r}.")
        for entry in dataclasses.fields(self):
            _check_type(entry.name, getattr(self, entry.name), str(entry.type))
        if self.media_cache_bytes < 0:
            raise UsageError(f"media_cache_bytes must be 0 or more, got {self.media_cache_bytes!r}.")
        for kind, limit in (self.limit_mm_per_prompt or {}).items():
            if kind not in ("image", "audio") or type(limit) is not int or limit < 0:
                raise UsageError(
                    f"limit_mm_per_prompt takes image and audio, each a number of items, got {kind!r}: {limit!r}."
                )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}.")
        if not 0 < self.distributed_timeout_seconds <= _LONGEST_TIMEOUT_S:
            raise UsageError(
                f"distributed_timeout_seconds must be a positive number of at most {_LONGEST_TIMEOUT_S:,}, got "
                f"{self.distributed_timeout_seconds!r}."
            )
        for entry in dataclasses.fields(self):
            choices = entry.metadata["choices"]
            if choices and getattr(self, entry.name) not in choices:
                raise UsageError(
                    f"{entry.name} must be one of {', '.join(choices)}, got {getattr(self, entry.name)!r}."
                )

    @classmethod
    def create(cls, model: str, **kwargs: Any) -> EngineArgs:
        """Build from keyword arguments, None being the same as none; an unknown name is a usage error that names the
        nearest known one."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        for name in kwargs:
            if name not in known:
                import difflib

                refuse_known("engine argument", name, ENGINE_ARGUMENTS)
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(known))}."
                raise UsageError(f"unknown engine argument {name!r}.", hint=hint)
        if not isinstance(model, str | os.PathLike):
            raise UsageError(f"the model must be a directory, a file or a hub id, got {model!r}.")
        return cls(model=str(model), **{name: value for name, value in kwargs.items() if value is not None})

    def replace(self, **changes: Any) -> EngineArgs:
        return dataclasses.replace(self, **changes)


#: What a field of each declared type takes, and its name in the message. torch's own objects may stand for their names.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "float": (Real, "a number"),
    "str": (str | os.PathLike, "a string"),
    "Mapping[str, Any]": (Mapping, "a mapping"),
    "Mapping[str, str]": (Mapping, "a mapping"),
    "Sequence[str]": (list | tuple, "a list of strings"),
}
_TORCH_OBJECTS = ("dtype", "device")


def _check_type(name: str, value: Any, annotation: str) -> None:
    """A string that happens to be true must not switch anything on, least of all trust."""
    kind = annotation.removesuffix(" | None")
    if value is None or kind not in _KINDS or name in _TORCH_OBJECTS:
        return
    expected, words = _KINDS[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        raise UsageError(f"{name} must be {words}, got {value!r}.")
    if kind == "Sequence[str]" and not all(isinstance(entry, str) for entry in value):
        raise UsageError(f"{name} must be {words}, got {value!r}.")
