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
    scheduler, pool = engine.scheduler, engine.kv.pool
    return EngineStats(
        waiting=len(scheduler.waiting),
        running=len(scheduler.running),
        free_blocks=pool.num_free,
        blocks=pool.num_usable,
        preemptions=scheduler.num_preemptions,
    )
