"""How much memory the KV cache may take: what is free now, less what a step needs, never beyond the given share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from modelbay.args import EngineArgs
from modelbay.config import ModelConfig
from modelbay.errors import EngineError
from modelbay_runtime.engine.kv_layout import CacheLayout
from modelbay_runtime.kernels.attention import SCORE_ELEMENTS

#: cgroup v2 and v1: a container's own limit, which the machine's free memory does not show. Folder, limit, usage, and
#: the line of memory.stat that says how much of the usage are files that the kernel drops when memory is wanted.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """``num_blocks`` (one of them the null block) and where the number came from."""

    num_blocks: int
    bytes: int
    source: str


def free_bytes(device: torch.device, share: float) -> int:
    """Bytes that may still be taken on ``device`` so that ``share`` is kept.

    On a GPU the share is of the device's memory, on a CPU of what is free for this process.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - share) * total)
    return int(share * min(psutil.virtual_memory().available, _cgroup_free()))


def _cgroup_free() -> float:
    for folder, limit_file, usage_file, reclaimable in _CGROUPS:
        try:
            limit = Path(folder, limit_file).read_text().strip()
            if limit != "max":
                stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
                # Reading a checkpoint fills the file cache: that is not memory in use.
                return int(limit) - int(Path(folder, usage_file).read_text()) + int(stat.get(reclaimable, 0))
        except (OSError, ValueError):
            continue
    return float("inf")


def step_tokens(args: EngineArgs, max_model_len: int) -> int:
    """Most tokens that a step computes: a whole prompt must fit where prompts may not be split."""
    wanted = args.max_num_batched_tokens
    return wanted if args.enable_chunked_prefill else max(wanted, max_model_len)


def step_bytes(config: ModelConfig, args: EngineArgs, itemsize: int) -> int:
    """An estimate of the most that one step's activations take: the widest layer's tensors, the mask of a chunk over a
    whole context, one sequence's keys and values gathered, a block of scores, and float32 logits twice."""
    tokens = step_tokens(args, config.max_model_len)
    width = 4 * config.hidden_size + 3 * (config.intermediate_size or 4 * config.hidden_size)
    width += 2 * (config.num_heads + 2 * config.num_kv_heads) * config.head_size
    context = tokens + 2 * (config.num_kv_heads or 1) * config.head_size
    elements = tokens * width + config.max_model_len * context
    return elements * itemsize + 4 * SCORE_ELEMENTS + args.max_num_seqs * config.vocab_size * 8


def plan_cache(
    layout: CacheLayout,
    config: ModelConfig,
    args: EngineArgs,
    device: torch.device,
    itemsize: int,
    max_model_len: int,
    reserved: int = 0,
    layers: Collection[int] | None = None,
    sharers: int = 1,
) -> CacheBudget:
    """How many blocks to make.

    Args:
        layers: those whose cache is on this rank; all of the layout's, if not given.
        reserved: bytes that are free now and will be taken before the cache is, as by weights not loaded yet.
        sharers: ranks that take their part of this device's memory at the same time, this one included.

    Raises:
        EngineError: not even one block fits, with the numbers.
    """
    block_bytes = layout.page_elements(layers) * itemsize
    if not block_bytes:
        return CacheBudget(1, 0, "no layer keeps anything")
    useful = layout.blocks_for(max_model_len, step_tokens(args, max_model_len)) * args.max_num_seqs + 1
    if args.kv_cache_memory_bytes is not None:
        budget, source = args.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        free = free_bytes(device, args.gpu_memory_utilization) // sharers - reserved
        budget = free - step_bytes(config, args, itemsize)
        source = f"{args.gpu_memory_utilization:g} of what is free on {device}, less the activations of a step"
        source += f", one rank's of {sharers}" if sharers > 1 else ""
    num_blocks = budget // block_bytes
    if num_blocks >= useful:
        num_blocks, source = useful, f"all that max_num_seqs={args.max_num_seqs} sequences can use"
    if num_blocks < 2:
        raise EngineError(
            f"no room for the KV cache: {max(budget, 0):,} bytes ({source}), and one block takes {block_bytes:,}.",
            hint="Free memory, or set kv_cache_memory_bytes, or lower max_num_batched_tokens.",
        )
    return CacheBudget(num_blocks, num_blocks * block_bytes, source)


def longest_that_fits(layout: CacheLayout, args: EngineArgs, length: int, usable: int) -> int:
    """``length``, or the most tokens of it for which one sequence's blocks are among ``usable`` ones.

    Raises:
        EngineError: the user asked for this length, and it does not fit.
    """

    def blocks_for(tokens: int) -> int:
        return layout.blocks_for(tokens, step_tokens(args, tokens))

    if blocks_for(length) <= usable:
        return length
    if args.max_model_len is not None:
        raise EngineError(
            f"max_model_len={length} needs {blocks_for(length)} cache blocks for one sequence, and {usable} fit.",
            hint="Lower max_model_len or raise kv_cache_memory_bytes.",
        )
    low, high = 1, length
    while low < high:  # the longest length whose blocks fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks_for(middle) <= usable else (low, middle - 1)
    return low
