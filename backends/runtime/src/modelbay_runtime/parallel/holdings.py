"""Who holds what: every rank's part of a model and its size, from modules on meta.

The ranks of a stage differ in which slices they hold and not in how large these are (what does not divide is padded,
or refused), so that one module for each stage is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from modelbay.errors import UsageError
from modelbay.plans import split_stages
from modelbay.resolve import Resolution
from modelbay_runtime.build import BuiltModel, build_model
from modelbay_runtime.layout import Shard
from modelbay_runtime.load_targets import Target, find_targets
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.mesh import Mesh, Place
from modelbay_runtime.parallel.plan import ROUTED, layer_styles
from modelbay_runtime.quantised import is_scale

#: Ranks that are listed; more would be memory, and nobody's plan.
_MOST_RANKS = 1 << 20
#: Styles of embedding and head.
_BY_TOKEN = ("embedding_rowwise", "colwise_gather_output")
_NUMBERED = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class RankHoldings:
    """What one rank holds.

    Attributes:
        layers, experts, tokens: numbers from the first to before the second; None where there is no such thing or, for
            experts and tokens (rows of embedding and head), where none of them is whole on this rank.
        outside: modules outside of the layers.
        parameters: with copies that other ranks have too, and ``padding``. weight_bytes: theirs.
        kv_bytes: of the cache per token, and ``state_bytes`` per sequence.
    """

    rank: int
    replica: int
    stage: int
    share: int
    layers: tuple[int, int]
    experts: tuple[int, int] | None
    tokens: tuple[int, int] | None
    outside: tuple[str, ...]
    parameters: int
    padding: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class ActiveParameters:
    """Those that one token's way goes through: all but the experts it is not sent to and the other tokens' embeddings.

    ``formula`` says how ``without_embedding`` comes about; with the input embedding it is ``with_embedding``.
    """

    without_embedding: int
    with_embedding: int
    formula: str


@dataclass(frozen=True, slots=True)
class Holdings:
    """A whole mesh. ``parameters`` counts each once; ``held`` is the sum over ranks, of which ``copies`` are held by
    another rank too and ``padding`` are nobody's: ``held = parameters + copies + padding``."""

    mesh: Mesh
    dtype: str
    parameters: int
    held: int
    copies: int
    padding: int
    active: ActiveParameters | None
    ranks: list[RankHoldings] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


def holdings(resolution: Resolution, mesh: Mesh) -> Holdings:
    """What each rank of ``mesh`` would hold; no weights are read.

    Raises:
        UsageError: a size that does not divide, with the numbers.
    """
    if mesh.size > _MOST_RANKS:
        raise UsageError(f"{mesh}: at most {_MOST_RANKS:,} ranks are planned, each by itself.")
    stages = []
    counted: dict[str, Target] = {}
    for stage in range(mesh.pp):
        built = build_model(resolution, ParallelContext.apart(mesh, Place(pp_rank=stage)))
        targets = find_targets(built.module, tie=resolution.config.tie_word_embeddings)
        named = {name: target for name, target in targets.by_name.items() if not target.storage.buffer}
        stages.append((built, named))
        again = {name for other, name in targets.tied.items() if other in counted}  # by its name on an earlier stage
        counted |= {n: t for n, t in named.items() if not is_scale(t.storage.holders) and n not in again}
    whole = {name: prod(target.whole_shape()) for name, target in counted.items()}
    ranks = _all_ranks(resolution, mesh, stages)
    parameters, held, padding = sum(whole.values()), sum(r.parameters for r in ranks), sum(r.padding for r in ranks)
    return Holdings(
        mesh=mesh,
        dtype=resolution.config.dtype,
        parameters=parameters,
        held=held,
        copies=held - padding - parameters,
        padding=padding,
        active=_active(resolution, {name: t for _, named in stages for name, t in named.items()}, whole),
        ranks=ranks,
    )


def _all_ranks(
    resolution: Resolution, mesh: Mesh, stages: Sequence[tuple[BuiltModel, Mapping[str, Target]]]
) -> list[RankHoldings]:
    """Ranks that hold the same are looked at once."""
    seen: dict[tuple[int, ...], RankHoldings] = {}
    ranks = []
    for number in range(mesh.size):
        place = mesh.place(number)
        same = (place.pp_rank, place.tp_rank, place.dp_rank if mesh.expert_parallel else 0)
        if same not in seen:
            seen[same] = _rank(resolution, mesh, number, *stages[place.pp_rank])
        ranks.append(replace(seen[same], rank=number, replica=place.dp_rank))
    return ranks


def _rank(
    resolution: Resolution, mesh: Mesh, number: int, built: BuiltModel, named: Mapping[str, Target]
) -> RankHoldings:
    place, config, itemsize = mesh.place(number), resolution.config, built.context.dtype.itemsize
    layers = split_stages(config.num_layers, mesh.pp)[place.pp_rank]
    of_experts = _first_shard(t for n, t in named.items() if ROUTED.search(n))
    by_token = _by_token(built, named)
    sizes = {name: prod(target.shape) for name, target in named.items()}
    return RankHoldings(
        rank=number,
        replica=place.dp_rank,
        stage=place.pp_rank,
        share=place.tp_rank,
        layers=(layers.start, layers.stop),
        experts=_range(of_experts, place.dp_rank * mesh.tp + place.tp_rank),
        tokens=_range(_first_shard(named[name] for name in by_token), place.tp_rank),
        outside=tuple(dict.fromkeys(name.rpartition(".")[0] for name in named if not _NUMBERED.search(name))),
        parameters=sum(sizes[name] for name, target in named.items() if not is_scale(target.storage.holders)),
        padding=sum(_padding(named[name], place.tp_rank) for name in by_token),
        weight_bytes=sum(sizes[name] * target.storage.dtype.itemsize for name, target in named.items()),
        kv_bytes=sum(spec.row for spec in built.kv_specs.values()) * itemsize,
        state_bytes=sum(spec.per_sequence for spec in built.kv_specs.values()) * itemsize,
    )


def _by_token(built: BuiltModel, named: Mapping[str, Target]) -> list[str]:
    """The parameters that are cut by tokens, which are the ones that may be padded."""
    styles = layer_styles(built.module)
    return [name for name in named if styles.get(name.rpartition(".")[0].removeprefix("model.")) in _BY_TOKEN]


def _first_shard(targets: Iterable[Target]) -> Shard | None:
    """The first rank's slice of what is cut along dimension 0."""
    return next((target.shard for target in targets if target.shard is not None and target.shard.dim == 0), None)


def _range(first: Shard | None, rank: int) -> tuple[int, int] | None:
    """The numbers that ``rank`` has, of which the first rank has ``first``: all have as many, in order."""
    if first is None or first.total is None:
        return None
    each = first.size + first.pad
    return min(rank * each, first.total), min((rank + 1) * each, first.total)


def _padding(target: Target, rank: int) -> int:
    """Elements of this rank that are nobody's."""
    own = _range(target.shard, rank)
    if own is None:
        return 0
    rows, *rest = target.shape
    return (rows - (own[1] - own[0])) * prod(rest)


def _active(resolution: Resolution, named: Mapping[str, Target], whole: Mapping[str, int]) -> ActiveParameters | None:
    config = resolution.config
    routed = sum(size for name, size in whole.items() if ROUTED.search(name))
    chosen = config.get("num_experts_per_tok")
    if routed and not (config.num_experts and isinstance(chosen, int)):
        return None
    everything = sum(whole.values())
    idle, formula = 0, f"{everything:,} in all"
    if routed and config.num_experts:
        idle = routed // config.num_experts * (config.num_experts - chosen)
        formula += f" - {routed:,} of experts × ({config.num_experts} - {chosen}) / {config.num_experts}"
    embedding = 0 if config.tie_word_embeddings else _input_embedding(named, config.vocab_size)
    if embedding:
        formula += f" - {embedding:,} of the input embedding"
    return ActiveParameters(everything - idle - embedding, everything - idle, formula)


def _input_embedding(named: Mapping[str, Target], vocab_size: int) -> int:
    for name, target in named.items():
        shape = target.whole_shape()
        if len(shape) == 2 and shape[0] == vocab_size and not name.startswith("lm_head."):
            return prod(shape)
    return 0
