"""Fill a module tree from a checkpoint: everything is checked by name and shape first, then tensors are streamed.

Peak memory is the parameters themselves plus the tensor that is being copied: a parameter gets its memory right before
its first tensor, a tensor is a view of the mapped file, converted by the one copy, and its pages are given back.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from modelbay.errors import WeightsError
from modelbay.resolve import quantization_transforms
from modelbay.specs import LoadFormatSpec, load_target
from modelbay.weights.accounting import LoadReport, ParameterUse
from modelbay.weights.choose import choose_format
from modelbay.weights.dummy import DummySource
from modelbay.weights.formats import TensorEntry, WeightSource
from modelbay.weights.index import shorten
from modelbay.weights.matching import BEYOND, MODEL, NOT_STRICT, Expected, Known, Matching, match_names
from modelbay.weights.names import adapt_pieces, make_pieces
from modelbay.weights.pieces import Narrow, Piece
from modelbay_runtime.load_stream import Streamer, dtype_name, read_piece
from modelbay_runtime.load_targets import Target, Targets, find_targets
from modelbay_runtime.quantised import is_scale

if TYPE_CHECKING:
    from modelbay.config import ModelConfig
    from modelbay.resolve import Resolution
    from modelbay.trace import Trace
    from modelbay.weights.transforms import Transform

_COMPARE_BYTES = 16 << 20
_LOG = logging.getLogger("modelbay.weights")


def load_weights(
    model: nn.Module, resolution: Resolution, *, device: torch.device | str, dtype: torch.dtype | None = None
) -> LoadReport:
    """Fill every parameter and persistent buffer of ``model``, and account for every tensor of the checkpoint.

    Args:
        model: built on the meta device (or already on ``device``); see `modelbay_runtime.layout` for what its modules
            may say about themselves.
        device: where parameters and buffers end up.
        dtype: of the parameters; those that were built in another dtype than most keep theirs.

    Raises:
        WeightsError: the checkpoint is damaged or does not fit. Before the first parameter changes, unless the data
            itself cannot be read.
    """
    started = time.perf_counter()
    device = _with_index(torch.device(device))
    args, config = resolution.args, resolution.config
    spec, load_format = choose_format(args.load_format, resolution.files, resolution.plugins, resolution.trace)
    resolution.trace.log_warnings("weights", _LOG)  # of files that are left aside
    # Backbones of several dtypes were built in them.
    kept = dtype is None or bool(config.backbone_dtypes)
    targets = find_targets(model, tie=config.tie_word_embeddings, dtype=None if kept else dtype)
    with load_format.open(resolution.files, config, args) as source:
        entries, matching, report = _match(model, targets, source, spec, resolution)
        _check_ties(source, matching, entries, targets, config)
        streamer = Streamer(model, targets, device, report)
        loaded = [part for piece in matching.loaded for part in targets[piece.name].cut(piece)]
        streamer.stream(source, loaded, matching.missing, entries)
        streamer.fill_missing(matching.missing, args.seed)
    streamer.finish()
    report.seconds = time.perf_counter() - started
    resolution.trace.decide("weights", "loaded", report.summary(), shorten(report.files, 3))
    for duplicate, original in matching.tied:
        resolution.trace.decide(
            "weights", f"{duplicate.source}", f"equals {original.source}, tied", "tie_word_embeddings"
        )
    _warn_of_the_unused(resolution.trace, report, config)
    _warn_of_the_made_up(resolution.trace, report)
    assert not report.unaccounted(), report.unaccounted()
    return report


def match_weights(model: nn.Module, resolution: Resolution, source: WeightSource, spec: LoadFormatSpec) -> LoadReport:
    """Whether an open checkpoint would fill ``model``, by its names, shapes and dtypes alone: no tensor is read.

    The report's accounts are open: what is ignored is entered, nothing is loaded.

    Raises:
        WeightsError: it would not; what `load_weights` would raise.
    """
    targets = find_targets(model, tie=resolution.config.tie_word_embeddings)
    _, _, report = _match(model, targets, source, spec, resolution)
    _warn_of_the_unused(resolution.trace, report, resolution.config)
    return report


def _match(
    model: nn.Module, targets: Targets, source: WeightSource, spec: LoadFormatSpec, resolution: Resolution
) -> tuple[Mapping[str, TensorEntry], Matching, LoadReport]:
    """What becomes of every tensor, decided and entered in the accounts before any is read."""
    args, config = resolution.args, resolution.config
    made_up = isinstance(source, DummySource)
    if isinstance(source, DummySource):
        source.expect(_dummy_tensors(targets, (name for name in targets.by_name if not _is_buffer(targets, name))))
    entries = source.entries()
    known = Known(_expected(model, targets, config, made_up))
    kept = {name for name, target in targets.by_name.items() if is_scale(target.storage.holders)}
    pieces = make_pieces(entries, (), config) if made_up else _pieces(entries, spec, model, resolution, known, kept)
    matching = match_names(pieces, known.expected, strict=args.strict)
    _check_fit(matching, entries, targets)
    report = LoadReport(spec.name)
    _open_accounts(report, entries, targets, matching)
    return entries, matching, report


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` as the device that tensors on it will report."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _pieces(
    entries: Mapping[str, TensorEntry],
    spec: LoadFormatSpec,
    model: nn.Module,
    resolution: Resolution,
    known: Known,
    kept: set[str],
) -> list[Piece]:
    """The format's own names to Hugging Face's, then Hugging Face's to the model's."""
    config = resolution.config
    of_format = tuple(load_target(spec.transforms)(config)) if spec.transforms else ()
    of_format += quantization_transforms(config, resolution.plugins)
    of_model: tuple[Transform, ...] | None = getattr(model, "checkpoint_transforms", None)
    if of_model is not None:
        pieces = make_pieces(entries, of_format, config, known, kept_scales=kept, then=of_model)
        return adapt_pieces(pieces, of_model, config, known)
    of_arch = resolution.arch.transforms if resolution.arch else ()
    return make_pieces(entries, of_format + of_arch, config, known, kept_scales=kept)


def _is_buffer(targets: Targets, name: str) -> bool:
    return targets[name].storage.buffer


def _dummy_tensors(targets: Targets, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (targets[name].whole_shape(), dtype_name(targets[name].storage.dtype)) for name in names}


def _expected(model: nn.Module, targets: Targets, config: ModelConfig, made_up: bool) -> Expected:
    """``made_up``: the checkpoint is, so it has no buffers."""
    optional = tuple(map(re.compile, getattr(model, "checkpoint_optional", ())))
    buffers = [name for name in targets.by_name if _is_buffer(targets, name)]
    return Expected(
        names=tuple(name for name in targets.by_name if not (made_up and _is_buffer(targets, name))),
        fused=targets.fused,
        tied=targets.tied,
        computed=targets.computed,
        num_layers=config.num_layers,
        shapes={name: target.whole_shape() for name, target in (*targets.by_name.items(), *targets.whole.items())},
        prefixes=tuple(dict.fromkeys((MODEL, *getattr(model, "checkpoint_prefixes", ())))),
        optional=[name for name in buffers if any(pattern.search(name) for pattern in optional)],
        elsewhere=targets.elsewhere,
    )


def _check_fit(matching: Matching, entries: Mapping[str, TensorEntry], targets: Targets) -> None:
    """Shapes and kinds of dtype (W8), all at once.

    Raises:
        WeightsError: listing what does not fit.
    """
    wrong = []
    for piece in matching.loaded:
        target = targets[piece.name]
        entry = entries[piece.source]
        if not _shape_fits(piece.full_shape, target):
            wrong.append(f"{_what(piece)} is {list(piece.full_shape)}, the model wants {list(target.whole_shape())}")
        elif not _dtype_fits(getattr(torch, entry.dtype), target.storage.dtype):
            wrong.append(f"{piece.source} is {entry.dtype}, the model wants {dtype_name(target.storage.dtype)}")
    if wrong:
        different = list(dict.fromkeys(wrong))  # the members of a stack say the same
        raise WeightsError(
            f"{len(wrong)} tensors do not fit the model: {shorten(different, 4)}.",
            hint="Config and weights come from different models, or the checkpoint is quantised.",
        )


def _what(piece: Piece) -> str:
    if piece.slot is None:
        return piece.source
    return f"{piece.name}, stacked from {piece.slot.count} tensors,"


def _shape_fits(found: tuple[int, ...], target: Target) -> bool:
    wanted, shard = target.whole_shape(), target.shard
    if shard is None or shard.total is not None or len(found) != len(wanted):
        return found == wanted
    rest = [size for dim, size in enumerate(found) if dim != shard.dim]
    return found[shard.dim] >= wanted[shard.dim] and rest == [
        size for dim, size in enumerate(wanted) if dim != shard.dim
    ]


def _dtype_fits(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Floating-point numbers are converted, but to 8 bits, which mean nothing without the scales they were made for."""
    if wanted.is_floating_point and wanted.itemsize == 1:
        return found == wanted
    return _kind(found) == _kind(wanted)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "integer"


def _check_ties(
    source: WeightSource, matching: Matching, entries: Mapping[str, TensorEntry], targets: Targets, config: ModelConfig
) -> None:
    """A duplicate of a tied parameter must be one (W5).

    Raises:
        WeightsError: it differs, so that the checkpoint was not trained tied.
    """
    for duplicate, original in matching.tied:
        dtype = targets[original.name].storage.dtype
        if duplicate.full_shape == original.full_shape and _same(source, duplicate, original, dtype):
            continue
        where = config.sources.get("tie_word_embeddings", "the config")
        raise WeightsError(
            f"{duplicate.source} differs from {original.source}, but tie_word_embeddings is true ({where}).",
            hint="If the checkpoint is meant untied, set it to false in config.json or by hf_overrides.",
        )


def _same(source: WeightSource, first: Piece, second: Piece, dtype: torch.dtype) -> bool:
    """Equal once converted to ``dtype``; a few rows at a time, so that neither is in memory as a whole."""
    rows = first.shape[0] if first.shape else 1
    row_bytes = max(1, dtype.itemsize * torch.Size(first.shape).numel() // max(rows, 1))
    step = max(1, _COMPARE_BYTES // row_bytes)
    try:
        for start in range(0, rows, step):
            pieces = (first, second)
            if first.shape:
                size = min(step, rows - start)
                pieces = (first.then(Narrow(0, start, size)), second.then(Narrow(0, start, size)))
            left, right = (read_piece(source.read, piece).to(dtype) for piece in pieces)
            if not torch.equal(_bits(left), _bits(right)) and not torch.equal(left, right):
                return False
    finally:
        source.release(first.source)
        source.release(second.source)
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals itself here."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _open_accounts(
    report: LoadReport, entries: Mapping[str, TensorEntry], targets: Targets, matching: Matching
) -> None:
    report.files = tuple(dict.fromkeys(entry.file for entry in entries.values()))
    report.add_entries(entries.values())
    for name, target in targets.by_name.items():
        storage = target.storage
        report.parameters[name] = ParameterUse(name, storage.name, target.shape, dtype_name(storage.dtype))
    for name, canonical in targets.tied.items():
        storage = targets[canonical].storage
        report.parameters[name] = ParameterUse(name, canonical, storage.shape, dtype_name(storage.dtype), status="tied")
    for duplicate, _ in matching.tied:
        for name in duplicate.sources:
            report.tied(name, duplicate.name)
    for piece, rule in matching.ignored:
        for name in piece.sources:
            report.ignored(name, rule)


def _warn_of_the_unused(trace: Trace, report: LoadReport, config: ModelConfig) -> None:
    rules = report.ignored_by_rule()
    if BEYOND in rules and not config.get("num_nextn_predict_layers"):
        source = f"num_hidden_layers = {config.num_layers} ({config.sources.get('num_layers', 'the config')})"
        _warn(trace, BEYOND, f"{rules[BEYOND]} tensors not used", source)
    if NOT_STRICT in rules:
        _warn(trace, NOT_STRICT, f"{rules[NOT_STRICT]} tensors not used", trace.argument("strict"))


def _warn_of_the_made_up(trace: Trace, report: LoadReport) -> None:
    made_up = [use.name for use in report.parameters.values() if use.status == "initialised"]
    if made_up and report.format != "dummy":
        _warn(trace, "parameters without a tensor", f"made up: {shorten(made_up)}", trace.argument("strict"))


def _warn(trace: Trace, question: str, answer: str, source: str) -> None:
    """Into the trace, and into the log, since the output is another than the checkpoint's."""
    trace.warn("weights", question, answer, source)
    _LOG.warning("%s: %s [%s]", question, answer, source)
