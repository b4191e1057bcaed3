"""Whether a model would run here, found out with the functions that would run it, without its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from modelbay.errors import (
    ArchitectureError,
    AuthenticationError,
    BackendError,
    ConfigError,
    EngineError,
    GatedModelError,
    ModelbayError,
    OfflineError,
    PluginError,
    RemoteCodeError,
    SourceError,
    TokenizerError,
    TrustError,
    UsageError,
    WeightsError,
)
from modelbay.resolve import Resolution, engine_args, resolve_args
from modelbay.settings import load_settings
from modelbay.tokenizer import load_tokenizer
from modelbay.trace import Trace
from modelbay.weights.choose import choose_format
from modelbay_runtime.build import BuiltModel, build_model
from modelbay_runtime.engine.kv_layout import CacheLayout, plan_layout
from modelbay_runtime.engine.memory import free_bytes, longest_that_fits, plan_cache, step_bytes, step_tokens
from modelbay_runtime.loading import match_weights
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.sizes import TensorParallelSize
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_runtime.slicing import slices, undivided

#: What kind of thing is missing, by the error that says so; the first that fits.
_KINDS: tuple[tuple[tuple[type[ModelbayError], ...], str], ...] = (
    ((TrustError,), "trust"),
    ((AuthenticationError, GatedModelError, OfflineError), "access"),
    ((SourceError, WeightsError, TokenizerError, RemoteCodeError), "file"),
    ((ArchitectureError, BackendError, PluginError), "plugin"),
    ((ConfigError,), "config"),
    ((UsageError,), "argument"),
    ((EngineError,), "memory"),
)


@dataclass(frozen=True, slots=True)
class Missing:
    """Something without which the model does not run: a plugin, trust, a file, access, memory …"""

    kind: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """In bytes; lengths in tokens.

    Attributes:
        weights: parameters of one rank. copies: of those, second ones, in the form that a kernel multiplies fastest,
            of what is needed in its own form too: a head that is the embedding.
        activations: an upper estimate of one step's.
        cache_per_token: of one sequence that fills its blocks. cache_per_sequence: of the longest one.
        free: what may be taken on the device. sequences: how many of the longest fit beside the weights.
        max_model_len: the longest sequence that is served here; shorter than the model's if memory is.
    """

    device: str
    dtype: str
    weights: int
    copies: int
    activations: int
    cache_per_token: int
    cache_per_sequence: int
    free: int
    max_model_len: int | None = None
    sequences: int | None = None


@dataclass(slots=True)
class CheckReport:
    """The verdict on one model. ``missing`` is empty if and only if it would run.

    ``tensor_parallel_sizes``: into how many ranks its layers can be sliced; see `modelbay_runtime.slicing`.
    """

    model: str
    resolution: dict[str, Any] | None = None
    memory: MemoryNeed | None = None
    weights: dict[str, Any] | None = None
    tensor_parallel_sizes: list[TensorParallelSize] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace, repr=False)
    exit_codes: list[int] = field(default_factory=list, repr=False)

    @property
    def runs(self) -> bool:
        return not self.missing

    @property
    def exit_code(self) -> int:
        """0: it runs. 2: it does not, and only because of what the arguments ask for. Else 1."""
        return min(self.exit_codes, default=0)

    @contextmanager
    def stage(self) -> Iterator[None]:
        """What this stage raises becomes something that is missing."""
        try:
            yield
        except ModelbayError as error:
            kind = next((kind for types, kind in _KINDS if isinstance(error, types)), "other")
            self.lacks(kind, error, error.exit_code)

    def lacks(self, kind: str, error: ModelbayError, exit_code: int) -> None:
        self.missing.append(Missing(kind, error.message, error.hint))
        self.exit_codes.append(exit_code)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "runs": self.runs,
            "resolution": self.resolution,
            "weights": self.weights,
            "memory": asdict(self.memory) if self.memory else None,
            "tensor_parallel_sizes": [asdict(size) for size in self.tensor_parallel_sizes],
            "missing": [asdict(missing) for missing in self.missing],
            "warnings": [decision.to_dict() for decision in self.trace.warnings()],
        }


def check_model(model: str, kwargs: Mapping[str, Any]) -> CheckReport:
    """Walk the stages of a start, up to the weights, and note what would end it.

    Args:
        kwargs: engine arguments, as for `modelbay.LLM`.

    Raises:
        UsageError: the arguments make no sense, whatever the model.
    """
    report, settings = CheckReport(model), load_settings()
    args = engine_args(model, kwargs, settings, report.trace)
    resolution: Resolution | None = None
    built: BuiltModel | None = None
    with report.stage():
        resolution = resolve_args(args, trace=report.trace, settings=settings)
    if resolution is None:
        return report
    report.resolution = _summary(resolution)
    with report.stage():
        built = _build(report, resolution)
        if built is not None:
            report.memory = _memory(built, resolution)
            _check_memory(report, built, resolution)
    with report.stage():
        load_tokenizer(resolution.files, resolution.config, resolution.plugins, resolution.args, resolution.trace)
    with report.stage():
        report.weights = _weights(resolution, built)
    with report.stage():
        _check_sampling(resolution)
    return report


def _build(report: CheckReport, resolution: Resolution) -> BuiltModel | None:
    """The module of the first rank, and how else the model could be sliced; None where it cannot be divided as asked.

    Raises:
        ModelbayError: the model cannot be built, divided or not.
    """
    built: BuiltModel | None = None
    try:
        built = build_model(resolution)
    except ModelbayError as error:
        if Mesh.of(resolution.args) == Mesh():
            raise
        build_model(undivided(resolution))
        # The model is one that can be built, so it is the division: an argument, whatever the error's type says.
        report.lacks("argument", error, UsageError.exit_code)
    report.tensor_parallel_sizes = slices(resolution, built)
    return built


def _check_sampling(resolution: Resolution) -> None:
    """That a request which says nothing can be sampled.

    Raises:
        ConfigError: a default of generation_config.json is none that a request could have asked for.
    """
    if resolution.task == "generate":
        SamplingParams().with_defaults(resolution.config.generation)


def _summary(resolution: Resolution) -> dict[str, Any]:
    return {
        "commit": resolution.files.commit,
        "task": resolution.task,
        "architecture": resolution.architecture,
        "backend": resolution.backend,
        "owner": str(resolution.owner) if resolution.owner and resolution.arch else None,
    }


def _layout(built: BuiltModel, resolution: Resolution) -> CacheLayout:
    return plan_layout(built.kv_specs, resolution.args.block_size)


def _memory(built: BuiltModel, resolution: Resolution) -> MemoryNeed:
    args, config, itemsize = resolution.args, resolution.config, built.context.dtype.itemsize
    layout = _layout(built, resolution)
    blocks = layout.blocks_for(built.max_model_len, step_tokens(args, built.max_model_len))
    return MemoryNeed(
        device=str(built.context.device),
        dtype=config.dtype,
        weights=built.parameter_bytes() + (copies := built.copied_bytes()),
        copies=copies,
        activations=step_bytes(config, args, itemsize),
        cache_per_token=sum(spec.row for spec in built.kv_specs.values()) * itemsize,
        cache_per_sequence=blocks * layout.page_elements() * itemsize,
        free=free_bytes(built.context.device, args.gpu_memory_utilization),
    )


def _check_memory(report: CheckReport, built: BuiltModel, resolution: Resolution) -> None:
    """How long a sequence, and how many of them, fit beside the weights.

    Raises:
        EngineError: not even the weights, or not one block.
    """
    need, args, config = report.memory, resolution.args, resolution.config
    assert need is not None
    taken = need.weights + need.activations + (args.kv_cache_memory_bytes or 0)
    if taken > need.free:
        cache = f" and the cache ({args.kv_cache_memory_bytes:,})" if args.kv_cache_memory_bytes else ""
        raise EngineError(
            f"weights ({need.weights:,} bytes) and activations ({need.activations:,}){cache} need more than "
            f"the {need.free:,} bytes that may be taken on {need.device}.",
            hint="Use a smaller dtype, a smaller model, or free memory.",
        )
    layout, itemsize = _layout(built, resolution), built.context.dtype.itemsize
    length = built.max_model_len
    budget = plan_cache(layout, config, args, built.context.device, itemsize, length, reserved=need.weights)
    usable = budget.num_blocks - 1
    fitting = longest_that_fits(layout, args, length, usable)
    blocks = layout.blocks_for(fitting, step_tokens(args, fitting))
    sequences = min(usable // blocks, args.max_num_seqs) if blocks else args.max_num_seqs
    report.memory = MemoryNeed(**{**asdict(need), "max_model_len": fitting, "sequences": sequences})


def _weights(resolution: Resolution, built: BuiltModel | None) -> dict[str, Any]:
    """The files that would be read, and, as far as they are on disk, whether their headers are sound and what they
    hold is what the module wants, where it could be built.

    Raises:
        WeightsError: there are none, an index names absent ones, one is damaged, or they do not fit the config.
    """
    files = resolution.files
    spec, load_format = choose_format(resolution.args.load_format, files, resolution.plugins, resolution.trace)
    names = load_format.select(files)
    absent = [name for name in names if not (files.root / name).is_file()]
    sizes = [files.size(name) for name in names]
    found: dict[str, Any] = {
        "load_format": spec.name,
        "files": list(names),
        "bytes": None if None in sizes else sum(size for size in sizes if size is not None),
        "to_download": sum(files.size(name) or 0 for name in absent),
        "tensors": None,
    }
    if names and not absent:
        with load_format.open(files, resolution.config, resolution.args) as source:
            found["tensors"] = len(source.entries())
            if built is not None:
                match_weights(built.module, resolution, source, spec)
    return found
