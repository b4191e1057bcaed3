"""What an engine is doing, as numbers: a snapshot that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Attributes:
    waiting, running: sequences. free_blocks, blocks: of the KV cache; blocks that are only remembered are free.
    preemptions: since the engine started.
    """

    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    blocks: int = 0
    preemptions: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the cache that sequences hold, from 0 to 1."""
        return 1 - self.free_blocks / self.blocks if self.blocks else 0.0


def engine_stats(engine: Any) -> EngineStats:
    """Read on the engine's own thread, between two steps."""
    schedulers, pools = [lane.scheduler for lane in engine.lanes], [lane.kv.pool for lane in engine.lanes]
    return EngineStats(
        waiting=sum(len(scheduler.waiting) for scheduler in schedulers),
        running=sum(len(scheduler.running) for scheduler in schedulers),
        free_blocks=sum(pool.num_free for pool in pools),
        blocks=sum(pool.num_usable for pool in pools),
        preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
    )
