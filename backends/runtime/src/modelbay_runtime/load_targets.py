"""What a module tree wants to be filled: every parameter, section of a packed parameter, and persistent buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from modelbay.errors import WeightsError
from modelbay.weights.pieces import Narrow, Piece
from modelbay.weights.views import cut_piece
from modelbay_runtime.layout import Section, Shard, said

_PACKED = ("weight", "bias")


@dataclass(slots=True)
class Storage:
    """One parameter or persistent buffer, under every name at which the tree holds it.

    ``pending`` counts the pieces still to be written; ``holders`` are (module, attribute) pairs; ``lent`` says that all
    of them put a copy in its place once it is complete.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: bool
    holders: list[tuple[nn.Module, str]]
    pending: int = 0
    padded: bool = False
    lent: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """As the tree holds it now."""
        module, attribute = self.holders[0]
        return (module._buffers if self.buffer else module._parameters)[attribute]  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def move(self, device: torch.device) -> None:
        """A real tensor to ``device``, for every holder."""
        if not self.tensor.is_meta and self.tensor.device != device:
            self._replace(self.tensor.to(device))

    def materialise(self, device: torch.device) -> torch.Tensor:
        """Memory for it on ``device``, unless it is there already in the right dtype; every holder sees the same."""
        current = self.tensor
        if current.device == device and current.dtype == self.dtype:
            return current.detach()
        data = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.hold(data)
        return data

    def hold(self, data: torch.Tensor) -> None:
        """Let the tree hold ``data``, which has the shape and dtype, with what is said of the tensor it holds now."""
        value = data
        if not self.buffer:
            value = nn.Parameter(data, requires_grad=False)
            value.__dict__.update(self.tensor.__dict__)
        self._replace(value)

    def _replace(self, value: torch.Tensor) -> None:
        for module, attribute in self.holders:
            table = module._buffers if self.buffer else module._parameters
            table[attribute] = value  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Target:
    """A logical name: (a section of) a storage, whole or as this rank's slice. ``shape`` is local.

    ``sliced``: it is a packed parameter as one tensor, and these are its sections, of each of which this rank has a
    slice.
    """

    name: str
    storage: Storage
    shape: tuple[int, ...]
    section: Section | None = None
    shard: Shard | None = None
    sliced: tuple[Target, ...] = ()

    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the logical tensor as far as it is known here."""
        if self.sliced:
            dim, sizes = self._dim(), [part.whole_shape() for part in self.sliced]
            return (*sizes[0][:dim], sum(size[dim] for size in sizes), *sizes[0][dim + 1 :])
        if self.shard is None:
            return self.shape
        size = self.shard.total or self.shard.start + self.shard.size
        return (*self.shape[: self.shard.dim], size, *self.shape[self.shard.dim + 1 :])

    def _dim(self) -> int:
        section = self.sliced[0].section
        assert section is not None
        return section.dim

    def cut(self, piece: Piece) -> list[Piece]:
        """A piece that fills it, as pieces that each fill one of its sections, if it must be taken apart for that."""
        if not self.sliced:
            return [piece]
        dim, start, pieces = self._dim(), 0, []
        for part in self.sliced:
            size = part.whole_shape()[dim]
            pieces += cut_piece(replace(piece, name=part.name), Narrow(dim, start, size))
            start += size
        return pieces

    def view(self) -> torch.Tensor:
        """The memory to write to; the storage must be materialised."""
        tensor = self.storage.tensor.detach()
        section = self.section
        return tensor if section is None else tensor.narrow(section.dim, section.start, section.size)


@dataclass(slots=True)
class Targets:
    """All of a module tree.

    Attributes:
        by_name: what must be filled.
        fused: a packed parameter's own name -> its sections' names, and ``whole`` the target it fills as one.
        tied: name -> the name of the parameter whose memory it shares.
        computed: non-persistent buffers.
        elsewhere: modules that other ranks hold, and the name of the rule by which their tensors are ignored.
    """

    by_name: dict[str, Target] = field(default_factory=dict)
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    whole: dict[str, Target] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    elsewhere: dict[str, str] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)

    def __getitem__(self, name: str) -> Target:
        return self.by_name[name] if name in self.by_name else self.whole[name]


def find_targets(model: nn.Module, *, tie: bool, dtype: torch.dtype | None = None) -> Targets:
    """Walk the tree once.

    Args:
        tie: whether ``tied_to`` attributes hold (the config's ``tie_word_embeddings``).
        dtype: replaces the dtype that most of the floating-point parameters were built in; the few that were built
            in another one keep it, and so do those of 8 bits.

    Raises:
        WeightsError: a tie or a section that does not fit the tree.
    """
    targets = Targets()
    change = _dtype_change(model, dtype)
    seen: dict[int, Storage] = {}
    ties: list[tuple[str, nn.Module, str, str]] = []
    absent: dict[str, str] = {}
    for path, module in model.named_modules():
        tied_to = said(module, "tied_to") if tie else None
        if rule := said(module, "held_elsewhere"):
            targets.elsewhere[path] = rule
            if tie and (tied_to := said(module, "weight_tied_to")):
                absent[f"{path}.weight"] = tied_to
            continue
        for attribute, value, buffer in _tensors(module):
            name = f"{path}.{attribute}" if path else attribute
            if buffer and attribute in module._non_persistent_buffers_set:
                targets.computed.add(name)
            elif tied_to and attribute == "weight" and not buffer and tied_to != name:
                ties.append((name, module, attribute, tied_to))
            elif id(value) in seen:
                seen[id(value)].holders.append((module, attribute))
                targets.tied[name] = seen[id(value)].name
            else:
                kind = value.dtype if buffer else change.get(value.dtype, value.dtype)
                storage = Storage(name, tuple(value.shape), kind, buffer, [(module, attribute)])
                seen[id(value)] = storage
                targets.storages.append(storage)
                _add(targets, path, module, attribute, storage)
    _tie(targets, ties)
    # On disk the tensor may have the name of either.
    targets.tied.update({name: tied_to for name, tied_to in absent.items() if tied_to in targets.by_name})
    return targets


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The module's own (attribute, tensor, is it a buffer)."""
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield attribute, parameter, False
    for attribute, buffer in module._buffers.items():
        if buffer is not None:
            yield attribute, buffer, True


def _add(targets: Targets, path: str, module: nn.Module, attribute: str, storage: Storage) -> None:
    """The logical names that one storage serves: its own, or those of its sections."""
    shards: dict[str, Shard] = said(module, "shards") or {}
    packed: tuple[Section, ...] = said(module, "packed") or ()
    parts: dict[str, tuple[Section, ...]] = said(module, "parts") or {}
    siblings: dict[str, tuple[Section, ...]] = said(module, "siblings") or {}
    beside = packed if attribute in _PACKED else siblings.get(attribute, ())
    sections = beside or parts.get(attribute, ())
    if storage.buffer or not sections:
        shard = shards.get(attribute)
        _register(targets.by_name, Target(storage.name, storage, storage.shape, None, shard))
        return
    # Siblings of the module, or of the parameter.
    outer, inner = (path.rpartition(".")[0], attribute) if beside else (path, "")
    names = []
    for section in sections:
        own = ".".join(part for part in (section.name, inner) if part)
        name = f"{outer}.{own}" if outer else own
        shape = (*storage.shape[: section.dim], section.size, *storage.shape[section.dim + 1 :])
        _register(targets.by_name, Target(name, storage, shape, section, shards.get(own)))
        names.append(name)
    covered = sum(section.size for section in sections)
    if covered != storage.shape[sections[0].dim]:
        raise WeightsError(f"the sections of {storage.name} cover {covered} of its {storage.shape} entries.")
    made = tuple(targets.by_name[name] for name in names)
    known = [target.shard is None or target.shard.total is not None for target in made]
    if all(known):
        targets.fused[storage.name] = tuple(names)
        sliced = made if any(target.shard for target in made) else ()
        targets.whole[storage.name] = Target(storage.name, storage, storage.shape, sliced=sliced)


def _register(by_name: dict[str, Target], target: Target) -> None:
    shard = target.shard
    if target.name in by_name:
        raise WeightsError(f"the model has two parameters that a checkpoint would call {target.name!r}.")
    if shard is not None and target.shape[shard.dim] != shard.size + shard.pad:
        raise WeightsError(
            f"the shard of {target.name} has {shard.size} + {shard.pad} entries, its shape is {target.shape}."
        )
    target.storage.padded |= shard is not None and shard.pad > 0
    by_name[target.name] = target


def _tie(targets: Targets, ties: list[tuple[str, nn.Module, str, str]]) -> None:
    storages = {storage.name: storage for storage in targets.storages}
    for name, module, attribute, tied_to in ties:
        storage = storages.get(targets.tied.get(tied_to, tied_to))
        shape = tuple(module._parameters[attribute].shape)  # type: ignore[union-attr]
        if storage is None or storage.shape != shape:
            found = "is not a parameter" if storage is None else f"has shape {storage.shape}, not {shape}"
            raise WeightsError(f"{name} is tied to {tied_to!r}, which {found}.")
        storage.holders.append((module, attribute))
        targets.tied[name] = storage.name


def _dtype_change(model: nn.Module, dtype: torch.dtype | None) -> dict[torch.dtype, torch.dtype]:
    """``{the dtype most parameters were built in: dtype}``."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return {max(sizes, key=lambda kind: sizes[kind]): dtype} if sizes and dtype is not None else {}
