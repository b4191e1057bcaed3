"""One rank's part of a model, ready to compute: built, loaded, with its cache.

Every rank goes through the same steps at the same time; where they must agree, each tells the others what it found, and
each draws the same conclusion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modelbay.errors import EngineError
from modelbay.resolve import Resolution
from modelbay_runtime.api import KVSpec
from modelbay_runtime.build import BuiltModel, build_model
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.kv_layout import CacheLayout, plan_layout
from modelbay_runtime.engine.memory import CacheBudget, longest_that_fits, plan_cache
from modelbay_runtime.engine.runner import Neighbours, Runner
from modelbay_runtime.loading import load_weights
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.pooling.pooler import Pooler

#: Every rank's value, by rank.
Gather = Callable[[Any], list[Any]]


@dataclass(slots=True)
class CachePlan:
    """What all ranks agreed on: the layout over all stages, the smallest budget, the longest sequence."""

    layout: CacheLayout
    budget: CacheBudget
    max_model_len: int


class Rank:
    """A model's part of one rank, with the cache that all ranks agreed on.

    Args:
        gather: asks all ranks for their values. Every rank calls it as often and in the same order.

    Raises:
        EngineError: ranks that do not agree on what a layer keeps, or no room for the cache.
    """

    def __init__(self, resolution: Resolution, parallel: ParallelContext, gather: Gather) -> None:
        self.resolution = resolution
        self.built: BuiltModel = build_model(resolution, parallel)
        context = self.built.context
        # Backbones in several dtypes were built in them.
        dtype = None if resolution.config.backbone_dtypes else context.dtype
        self.load_report = load_weights(self.built.module, resolution, device=context.device, dtype=dtype)
        self.model = self.built.module.eval()
        self.pooler = Pooler(self.model, resolution, context.device) if parallel.is_last_stage else None
        self.plan = self._agree(gather)
        layers = None if parallel.mesh.pp == 1 else self.built.kv_specs.keys()
        plan = self.plan
        self.cache = KVCache(plan.layout, plan.budget.num_blocks, context.dtype, context.device, layers)

    def runner(self, neighbours: Neighbours | None = None) -> Runner:
        vocab_size, media_cache = self.resolution.config.vocab_size, self.resolution.args.media_cache_bytes
        draft_tokens, max_seqs = self.built.context.draft_tokens, self.resolution.args.max_num_seqs
        return Runner(self.built, self.cache, vocab_size, neighbours, self.pooler, media_cache, draft_tokens, max_seqs)

    def _agree(self, gather: Gather) -> CachePlan:
        args, config, built = self.resolution.args, self.resolution.config, self.built
        found = gather((built.kv_specs, built.max_model_len))
        specs: dict[int, KVSpec] = {}
        for of_rank, _ in found:
            for layer, spec in of_rank.items():
                if specs.setdefault(layer, spec) != spec:
                    raise EngineError(f"layer {layer} keeps {spec} on one rank and {specs[layer]} on another.")
        layout = plan_layout(specs, args.block_size)
        wanted = min(length for _, length in found)
        context = built.context
        own = plan_cache(
            layout,
            config,
            args,
            context.device,
            context.dtype.itemsize,
            wanted,
            layers=built.kv_specs.keys(),
            reserved=args.media_cache_bytes if getattr(built.module, "media_kinds", ()) else 0,
            sharers=context.parallel.local_ranks if context.device.type == "cpu" else 1,
        )
        budget = min(gather(own), key=lambda each: each.num_blocks)
        fitting = longest_that_fits(layout, args, wanted, budget.num_blocks - 1)
        if fitting < wanted:
            reason = f"the cache holds no more ({wanted} in the config)"
            self.resolution.trace.warn("engine", "max_model_len", fitting, reason)
        return CachePlan(layout, budget, fitting)
