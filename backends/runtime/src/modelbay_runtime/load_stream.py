"""Copy the pieces of a checkpoint into a module tree, one tensor at a time, and finish each module as it completes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from tqdm import tqdm

from modelbay.errors import WeightsError
from modelbay.weights.accounting import LoadReport
from modelbay.weights.dummy import dummy_values
from modelbay.weights.formats import Index, TensorEntry, WeightSource
from modelbay.weights.index import shorten
from modelbay.weights.matching import ANOTHER_EXPERT, ANOTHER_RANK
from modelbay.weights.pieces import Narrow, Piece, Scale, Step
from modelbay_runtime.layout import said
from modelbay_runtime.load_lending import Lending, is_lent
from modelbay_runtime.load_targets import Storage, Target, Targets


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


Read = Callable[[str, Index], torch.Tensor]


def read_piece(read: Read, piece: Piece) -> torch.Tensor:
    """The piece on CPU, reading no more of its tensor than it needs; may be a view of mapped memory.

    Args:
        read: `WeightSource.read`.
    """
    if piece.scale is None:
        index, steps = piece.index()
        tensor = read(piece.source, index)
    else:
        tensor, steps = _read_scaled(read, piece.source, piece.scale, piece.without_scale())
    for step in steps:
        assert not isinstance(step, Scale), "a piece is scaled once, and first"
        tensor = step.apply(tensor)
    return tensor


def _read_scaled(read: Read, name: str, scale: Scale, piece: Piece) -> tuple[torch.Tensor, tuple[Step, ...]]:
    """Scaled values of the blocks that the piece is cut from, cut to it; the steps that are left."""
    index, steps = piece.index()
    if index is None:
        return scale.apply(read(name, None), read(scale.source, None)), steps
    blocks: list[slice] = []
    values: list[slice] = []
    inner: list[slice] = []
    for cut, size in zip(index, scale.block, strict=False):
        if cut.start is None:
            block = value = rest = cut
        else:
            first = cut.start // size
            block = slice(first, -(-cut.stop // size))
            value, rest = slice(first * size, cut.stop), slice(cut.start - first * size, None)
        blocks.append(block)
        values.append(value)
        inner.append(rest)
    return scale.apply(read(name, tuple(values)), read(scale.source, tuple(blocks)))[tuple(inner)], steps


class Streamer:
    """Writes pieces to their targets; calls ``post_load`` of a module once nothing in it is pending.

    Args:
        report: every write is entered in its accounts.
    """

    def __init__(self, model: nn.Module, targets: Targets, device: torch.device, report: LoadReport) -> None:
        self._model = model
        self._targets = targets
        self._device = device
        self._report = report
        self._lending = Lending(device)
        self._ready: set[int] = set()  # ids of materialised storages
        self._waiting: dict[int, list[_PostLoad]] = {}
        self._post_loads: list[_PostLoad] = []

    def stream(
        self, source: WeightSource, pieces: Sequence[Piece], missing: Sequence[str], entries: Mapping[str, TensorEntry]
    ) -> None:
        """Write every piece, in the order of ``entries``."""
        by_tensor: dict[str, list[tuple[Piece, Target]]] = {}
        for piece in pieces:
            target = self._targets[piece.name]
            if not _held(piece, target):
                for name in piece.sources:
                    self._report.ignored(name, ANOTHER_EXPERT if piece.slot else ANOTHER_RANK)
                continue
            target.storage.pending += 1
            by_tensor.setdefault(piece.source, []).append((piece, target))
        for name in missing:
            self._targets[name].storage.pending += 1
        self._prepare()
        total = sum(storage.nbytes for storage in self._targets.storages if storage.pending)
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not sys.stderr.isatty(), leave=False
        ) as bar:
            for name in entries:
                if name in by_tensor:
                    bar.update(self._write_tensor(source, name, by_tensor[name]))

    def fill_missing(self, names: Sequence[str], seed: int) -> None:
        """Made-up values where the checkpoint has none and ``strict`` is off; buffers stay as built."""
        for name in names:
            target = self._targets[name]
            storage, use = target.storage, self._report.parameters[name]
            if storage.buffer and not storage.tensor.is_meta:
                use.status = "kept"
                storage.move(self._device)
            else:
                use.status = "initialised"
                values = dummy_values(name, target.shape, dtype_name(storage.dtype), seed)
                self._memory(target).copy_(values)
            self._done(storage)

    def finish(self) -> None:
        """Run what waited for nothing, and make sure that nothing is left without memory.

        Raises:
            WeightsError: something is still on the meta device.
        """
        for post_load in self._post_loads:
            post_load.run()
        if any(_has_meta(module) for module in self._model.modules()):
            left = [name for name, tensor in self._model.named_parameters() if tensor.is_meta]
            left += [name for name, tensor in self._model.named_buffers() if tensor.is_meta]
            raise WeightsError(
                f"no checkpoint fills these, and the model left them on the meta device: {shorten(left)}.",
                hint="Buffers that are not saved must be built on a real device.",
            )

    def _prepare(self) -> None:
        """Buffers that no tensor fills go to the device; every ``post_load`` learns what it waits for."""
        filled = {id(storage) for storage in self._targets.storages if storage.pending}
        for storage in self._targets.storages:
            if storage.buffer and not storage.pending:
                self._report.parameters[storage.name].status = "kept"
                storage.move(self._device)
        for storage in self._targets.storages:
            storage.lent = bool(storage.pending) and is_lent(storage)
        held = {
            (id(module), attribute): storage
            for storage in self._targets.storages
            for module, attribute in storage.holders
        }
        modules = list(self._model.modules())
        for module in modules:
            for attribute in module._non_persistent_buffers_set:
                buffer = module._buffers.get(attribute)
                if buffer is not None and not buffer.is_meta:
                    module._buffers[attribute] = buffer.to(self._device)
        for module in reversed(modules):  # children before parents
            if callable(said(module, "post_load")):
                self._wait(module, held, filled)

    def _wait(self, module: nn.Module, held: dict[tuple[int, str], Storage], filled: set[int]) -> None:
        names = ((id(child), name) for child in module.modules() for name in (*child._parameters, *child._buffers))
        waits_for = {id(held[name]) for name in names if name in held} & filled
        own = [held[id(module), name] for name in module._parameters if (id(module), name) in held]
        post_load = _PostLoad(module, len(waits_for), own, self._lending)
        self._post_loads.append(post_load)
        for key in waits_for:
            self._waiting.setdefault(key, []).append(post_load)

    def _write_tensor(self, source: WeightSource, name: str, pieces: list[tuple[Piece, Target]]) -> int:
        """All pieces of one tensor; returns the bytes written. Its pages are given back before any ``post_load``, but
        for one that reads them itself."""
        written = 0
        kinds = set()
        made_up = self._report.format == "dummy"

        def read(tensor: str, index: Index) -> torch.Tensor:
            values = source.read(tensor, index)
            self._report.read(tensor, values.numel())
            return values

        for piece, target in pieces:
            memory, found = self._write(read, piece, target)
            on_disk = self._report.tensors[name].dtype if piece.scale else dtype_name(found)
            kinds.add((on_disk, dtype_name(memory.dtype)))
            written += memory.nbytes
            for part in self._targets.fused.get(target.name, (target.name,)):
                for tensor in piece.sources:
                    self._report.loaded(tensor, part, made_up=made_up)
            del memory
        for kind in sorted(kinds):
            self._report.cast(*kind)
        self._report.bytes_model += written
        for _, target in pieces:
            if self._lending.is_passed_on(target.storage):
                self._done(target.storage)
        for tensor in dict.fromkeys(name for piece, _ in pieces for name in piece.sources):
            source.release(tensor)
        for _, target in pieces:
            if target.storage.pending:
                self._done(target.storage)
        return written

    def _write(self, read: Read, piece: Piece, target: Target) -> tuple[torch.Tensor, torch.dtype]:
        """One piece to where it belongs; returns that memory, and the dtype that was found."""
        storage = target.storage
        values = self._read_alone(read, piece, target)
        if values is not None and _is_as_held(values, storage, self._device):
            self._lending.pass_on(storage, values)
            return values, values.dtype
        memory, own = _slice(self._memory(target), piece, target)
        if values is None:
            values = read_piece(read, own)
        memory.copy_(values)
        return memory, values.dtype

    def _read_alone(self, read: Read, piece: Piece, target: Target) -> torch.Tensor | None:
        """The piece, if it is the whole of a lent storage and all that the holders' ``post_load`` still wait for: they
        may be given what was read as it is."""
        storage = target.storage
        if not storage.lent or storage.pending > 1 or id(storage) in self._ready:
            return None
        if any(post_load.pending > 1 for post_load in self._waiting[id(storage)] if post_load.holds(storage)):
            return None
        place, own = _slice(target.view(), piece, target)  # still on meta: what matters is its shape
        return read_piece(read, own) if place.shape == storage.shape else None

    def _memory(self, target: Target) -> torch.Tensor:
        storage = target.storage
        if id(storage) not in self._ready:
            self._ready.add(id(storage))
            lent = storage.lent and storage.tensor.is_meta
            memory = self._lending.lend(storage) if lent else storage.materialise(self._device)
            if storage.padded:
                memory.zero_()
        return target.view()

    def _done(self, storage: Storage) -> None:
        storage.pending -= 1
        if storage.pending:
            return
        for post_load in self._waiting.pop(id(storage), ()):
            post_load.arrived()


class _PostLoad:
    """A module's ``post_load``, run once when all it waits for has arrived.

    Args:
        own: what the module itself holds.
    """

    def __init__(self, module: nn.Module, pending: int, own: Sequence[Storage], lending: Lending) -> None:
        self._module: nn.Module | None = module
        self.pending = pending
        self._own = own
        self._lending = lending

    def holds(self, storage: Storage) -> bool:
        return any(each is storage for each in self._own)

    def arrived(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.run()

    def run(self) -> None:
        module, self._module = self._module, None
        if module is not None:
            module.post_load()  # type: ignore[operator]
            self._lending.take_back(self._own)


def _is_as_held(values: torch.Tensor, storage: Storage, device: torch.device) -> bool:
    return values.dtype == storage.dtype and values.device == device and values.is_contiguous()


def _has_meta(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _held(piece: Piece, target: Target) -> bool:
    """Whether this rank holds any of the piece: false for the other ranks' experts."""
    return _overlap(piece, target) is not None


def _overlap(piece: Piece, target: Target) -> tuple[int, int] | None:
    """The entries along the shard's dimension of the logical tensor that the piece has and this rank holds: first
    and last + 1; None if there are none."""
    shard = target.shard
    if shard is None:
        return 0, 0
    first, last = shard.start, shard.start + shard.size
    slot, span = piece.slot, piece.span
    if slot is not None and slot.dim == shard.dim:
        first, last = max(first, slot.index), min(last, slot.index + 1)
    elif span is not None and piece.outer(span.dim) == shard.dim:
        first, last = max(first, span.start), min(last, span.start + piece.shape[span.dim])
    else:
        return first, last
    return (first, last) if first < last else None


def _slice(memory: torch.Tensor, piece: Piece, target: Target) -> tuple[torch.Tensor, Piece]:
    """Where the piece goes within its target's memory, and which part of it this rank reads."""
    shard, overlap = target.shard, _overlap(piece, target)
    if shard is None or overlap is None:
        return piece.place_in(memory), piece
    slot, span = piece.slot, piece.span
    first, last = overlap
    memory = memory.narrow(shard.dim, first - shard.start, last - first)
    if slot is not None and slot.dim == shard.dim:
        slot = replace(slot, index=0, count=1)
    else:
        dim = piece.inner(shard.dim)
        begin = first
        if span is not None and span.dim == dim:
            begin, span = first - span.start, None
        piece = piece.then(Narrow(dim, begin, last - first))
    return replace(piece, slot=slot, span=span).place_in(memory), piece
