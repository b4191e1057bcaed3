"""Which part of a tensor a rank holds, followed through the operations of a model's own code.

A rank runs the model's code on its share of the heads, or of the features between two linears. Whether what comes out
is its share of what the whole model computes is not a matter of belief: the code is run on meta twice, once whole and
once with shares, and every operation that meets a share must be one of which it is known what it does to shares. What
is not known (a norm over all heads, a reduction over split features, a slice across them) is refused.

A share is a contiguous block of one dimension: block r of ``parts`` equal ones. Of a dimension that holds several
things one after another (q, k and v of a fused projection) it is such a block of each of them: these are its sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

_aten = torch.ops.aten
_SHARE = "_modelbay_share"


@dataclass(frozen=True, slots=True)
class Share:
    """Dimension ``dim`` holds one of ``parts`` blocks, or of each of ``sections`` (sizes in the whole) one.
    ``sources``: the modules and parameters that it comes from."""

    dim: int
    parts: int
    sources: frozenset[str] = frozenset()
    sections: tuple[int, ...] = ()

    def at(self, dim: int) -> Share:
        return replace(self, dim=dim)


class NotShared(Exception):
    """An operation of which it is not known that it gives a share of what it gives for the whole."""

    def __init__(self, reason: str, sources: frozenset[str]) -> None:
        super().__init__(reason)
        self.reason, self.sources = reason, sources


def share_of(tensor: Any) -> Share | None:
    """The share that a tensor holds; None: it is whole."""
    return getattr(tensor, _SHARE, None)


def mark_share(tensor: torch.Tensor, share: Share | None) -> torch.Tensor:
    setattr(tensor, _SHARE, share)
    return tensor


Operands = Sequence[tuple[torch.Tensor, Share]]
Shape = tuple[int, ...]


def result_share(func: Any, args: Any, kwargs: Any, output: torch.Tensor, whole: Shape) -> Share | None:
    """What an operation's output holds.

    Args:
        whole: the shape that the same operation has in the whole model.

    Raises:
        NotShared: it cannot be told.
    """
    operands = _shared_operands(args, kwargs)
    if not operands or func.overloadpacket in _NEW:
        return _made_alone(func, args, output, whole)
    sources = frozenset[str]().union(*(share.sources for _, share in operands))
    packet = func.overloadpacket
    if any(share.sections for _, share in operands):
        return _of_sections(func, args, operands, output, whole)
    rule = _RULES.get(packet)
    if rule is None and torch.Tag.pointwise in func.tags:
        rule = _pointwise
    if rule is None:
        raise NotShared(f"{packet.__name__} on a share", sources)
    found = rule(args, kwargs, operands, output, whole)
    if found is None:
        raise NotShared(f"{packet.__name__} across shares", sources)
    found = replace(found, sources=sources)
    if not _fits(found, tuple(output.shape), whole):
        raise NotShared(f"{packet.__name__} gives {tuple(output.shape)} where the whole gives {whole}", sources)
    return found


def _shared_operands(args: Any, kwargs: Any) -> Operands:
    found: list[tuple[torch.Tensor, Share]] = []

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            share = share_of(value)
            if share is not None:
                found.append((value, share))
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item)

    look(args)
    look(list(kwargs.values()))
    return found


def _fits(share: Share, local: Shape, whole: Shape) -> bool:
    if len(local) != len(whole) or not 0 <= share.dim < len(local):
        return False
    return all(
        size * share.parts == full if dim == share.dim else size == full
        for dim, (size, full) in enumerate(zip(local, whole, strict=True))
    )


def _made_alone(func: Any, args: Any, output: torch.Tensor, whole: Shape) -> Share | None:
    """An output of whole operands: whole, but constants and repetitions made in the shape of a share are one."""
    local = tuple(output.shape)
    if local == whole:
        return None
    differing = [dim for dim, sizes in enumerate(zip(local, whole, strict=False)) if sizes[0] != sizes[1]]
    if len(local) == len(whole) and len(differing) == 1 and func.overloadpacket in _CONSTANT:
        dim = differing[0]
        repeated = func.overloadpacket is not _aten.expand or _expanded_from_one(args[0], dim, len(local))
        if local[dim] and not whole[dim] % local[dim] and repeated:
            return Share(dim, whole[dim] // local[dim])
    raise NotShared(f"{func.overloadpacket.__name__} gives {local} where the whole gives {whole}", frozenset())


def _expanded_from_one(tensor: torch.Tensor, dim: int, ndim: int) -> bool:
    inner = dim - (ndim - tensor.dim())
    return inner < 0 or tensor.shape[inner] == 1


def _of_sections(func: Any, args: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share:
    """Taking the sections apart, by splitting or by a dimension that counts them."""
    (tensor, share), packet = operands[0], func.overloadpacket
    found: Share | None = None
    if torch.Tag.pointwise in func.tags and len(_tensors(args, {})) == 1 and output.shape == tensor.shape:
        return share
    if len(operands) == 1 and packet in (_aten.split, _aten.split_with_sizes):
        dim = args[2] if len(args) > 2 else 0
        sizes = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(share.sections)
        if dim % tensor.dim() == share.dim and [size * share.parts for size in sizes] == list(share.sections):
            found = Share(share.dim, share.parts, share.sources)
    elif len(operands) == 1 and packet in _RESHAPES and len(set(share.sections)) == 1:
        before, count, done = math.prod(tensor.shape[: share.dim]), len(share.sections), 1
        for dim, full in enumerate(whole[:-1]):
            if done == before and full == count:
                found = Share(dim + 1, share.parts, share.sources)
                break
            done *= full
        if found is not None and whole[found.dim] % share.parts:
            found = None
    if found is None or not _fits(found, tuple(output.shape), whole):
        raise NotShared(f"{packet.__name__} of what holds {len(share.sections)} things", share.sources)
    return found


_RESHAPES = (_aten.view, _aten._unsafe_view, _aten.reshape, _aten._reshape_alias)
_CONSTANT = {
    _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty,
    _aten.expand, _aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like,
}  # fmt: skip

#: Of an operand they take no values.
_NEW = {_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.new_empty_strided}


# Rules: (args, kwargs, shared operands, output, shape of the whole) -> the share, or None if there is none


def _one(operands: Operands) -> tuple[torch.Tensor, Share] | None:
    return operands[0] if len(operands) == 1 else None


def _pointwise(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    """Every operand that is split, is so along the same dimension; the others are broadcast along it."""
    ndim = output.dim()
    found = {(share.dim + ndim - tensor.dim(), share.parts) for tensor, share in operands}
    if len(found) != 1:
        return None
    ((dim, parts),) = found
    for tensor in _tensors(args, kwargs):
        inner = dim - (ndim - tensor.dim())
        if share_of(tensor) is None and inner >= 0 and tensor.shape[inner] != 1:
            return None
    return Share(dim, parts)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    flat = [item for value in (*args, *kwargs.values()) for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, torch.Tensor)]


def _same(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    return operands[0][1]


def _view(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    """The block stays one block if as many elements lie before the dimension as did before."""
    tensor, share = operands[0]
    before = math.prod(tensor.shape[: share.dim])
    size = tensor.shape[share.dim] * share.parts
    done = 1
    for dim, full in enumerate(whole):
        if done == before and full > 1:
            # The block must hold whole entries of the new dimension, and the dimension whole blocks.
            inner = math.prod(tensor.shape[share.dim + 1 :])
            if full % share.parts or (size * inner) % full:
                return None
            return Share(dim, share.parts)
        done *= full
    return None


def _permute(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    order = [dim % tensor.dim() for dim in args[1]]
    return share.at(order.index(share.dim))


def _transpose(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    first, second = (0, 1) if len(args) < 3 else (dim % tensor.dim() for dim in args[1:3])
    return share.at({first: second, second: first}.get(share.dim, share.dim))


def _unsqueeze(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    _, share = operands[0]
    return share.at(share.dim + (args[1] % output.dim() <= share.dim))


def _squeeze(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    if len(args) < 2:
        return None
    dims = {dim % tensor.dim() for dim in (args[1] if isinstance(args[1], (list, tuple)) else [args[1]])}
    if share.dim in dims:
        return None
    return share.at(share.dim - sum(dim < share.dim and tensor.shape[dim] == 1 for dim in dims))


def _expand(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    return share.at(share.dim + output.dim() - tensor.dim())


def _along(position: int, default: int = 0) -> Callable[..., Share | None]:
    """An operation along one other dimension, which stays."""

    def rule(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
        tensor, share = operands[0]
        dim = args[position] if len(args) > position else kwargs.get("dim", default)
        return None if len(operands) > 1 or dim % tensor.dim() == share.dim else share

    return rule


def _split(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    return _along(2)(args, kwargs, operands, output, whole)


def _slice(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    dim = (args[1] if len(args) > 1 else 0) % tensor.dim()
    if dim == share.dim and tuple(output.shape) != tuple(tensor.shape):
        return None
    return share


def _select(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    dim = args[1] % tensor.dim()
    return None if dim == share.dim else share.at(share.dim - (dim < share.dim))


def _unbind(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    return _select((args[0], args[1] if len(args) > 1 else 0), kwargs, operands, output, whole)


def _cat(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    parts = [tensor for tensor in args[0] if tensor.dim() == output.dim()]
    along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % output.dim()
    shares = {(share.dim, share.parts) if share else None for share in map(share_of, parts)}
    if len(shares) != 1 or None in shares:
        return None
    share = operands[0][1]
    return None if share.dim == along else share


def _stack(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % output.dim()
    shares = {(share.dim, share.parts) if share else None for share in map(share_of, args[0])}
    if len(shares) != 1 or None in shares:
        return None
    share = operands[0][1]
    return share.at(share.dim + (at <= share.dim))


def _reduce(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if dims is None or isinstance(dims, bool):
        return None
    gone = {dim % tensor.dim() for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    if not gone or share.dim in gone or len(operands) > 1:
        return None
    keep = output.dim() == tensor.dim()
    return share if keep else share.at(share.dim - sum(dim < share.dim for dim in gone))


def _normalise(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    """Layer norm and RMS norm over the last dimensions."""
    found = _one(operands)
    if found is None or found[0] is not args[0]:
        return None
    tensor, share = found
    return share if share.dim < tensor.dim() - len(args[1]) else None


def _mm(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    return _product(args[0], args[1], operands, output)


def _addmm(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    if share_of(args[0]) is not None:
        return None
    found = _product(args[1], args[2], operands, output)
    at = found.dim - output.dim() + args[0].dim() if found else -1
    return None if at >= 0 and args[0].shape[at] != 1 else found


def _product(left: torch.Tensor, right: torch.Tensor, operands: Operands, output: torch.Tensor) -> Share | None:
    """Batches alike, rows of the left, or columns of the right; never the sum over a split dimension."""
    last = output.dim() - 1
    first, second = share_of(left), share_of(right)
    if first and second:
        return first if first.dim == second.dim < last - 1 and first.parts == second.parts else None
    if first:
        return first if first.dim == last - 1 else None
    return second if second and second.dim == last else None


def _as_complex(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    tensor, share = operands[0]
    return share if share.dim < tensor.dim() - 1 else None


def _index(args: Any, kwargs: Any, operands: Operands, output: torch.Tensor, whole: Shape) -> Share | None:
    """Picking along the leading dimensions alone, in whole numbers."""
    found = _one(operands)
    if found is None or found[0] is not args[0]:
        return None
    tensor, share = found
    used = [dim for dim, index in enumerate(args[1]) if index is not None]
    if used != list(range(len(used))) or share.dim < len(used):
        return None
    return share.at(share.dim + output.dim() - tensor.dim())


_RULES: dict[Any, Callable[..., Share | None]] = {
    **dict.fromkeys(_RESHAPES, _view),
    **dict.fromkeys((_aten.clone, _aten.detach, _aten.alias, _aten._to_copy, _aten.contiguous, _aten.zeros_like,
                     _aten.ones_like, _aten.empty_like, _aten.full_like, _aten.lift_fresh), _same),
    **dict.fromkeys((_aten.transpose, _aten.t), _transpose),
    **dict.fromkeys((_aten._softmax, _aten._log_softmax, _aten.cumsum, _aten.cumprod), _along(1)),
    **dict.fromkeys((_aten.split, _aten.split_with_sizes), _split),
    **dict.fromkeys((_aten.mean, _aten.sum, _aten.amax, _aten.amin, _aten.var, _aten.logsumexp),
                    _reduce),
    **dict.fromkeys((_aten.native_layer_norm, _aten._fused_rms_norm), _normalise),
    **dict.fromkeys((_aten.mm, _aten.bmm), _mm),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm), _addmm),
    **dict.fromkeys((_aten.copy_, _aten.masked_fill, _aten.masked_fill_, _aten.where), _pointwise),
    _aten.permute: _permute, _aten.unsqueeze: _unsqueeze, _aten.squeeze: _squeeze, _aten.expand: _expand,
    _aten.slice: _slice, _aten.select: _select, _aten.unbind: _unbind, _aten.cat: _cat, _aten.stack: _stack,
    _aten.index: _index, _aten.view_as_complex: _as_complex, _aten.view_as_real: _same,
}  # fmt: skip
