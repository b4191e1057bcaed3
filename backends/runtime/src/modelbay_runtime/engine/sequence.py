"""Requests and the sequences they run as: one prompt, ``n`` continuations."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a prompt.

    Attributes:
        token_ids: prompt and output so far.
        num_computed: tokens whose cache rows are written.
        slot: row of the block tables while it runs, -1 otherwise.
        sampling, detokenizer: their state belongs to the sampler and the detokenizer.
        leader: the sibling whose prompt blocks this one waits for, when a request has several.
    """

    request_id: str
    index: int
    num_prompt: int
    token_ids: list[int]
    sampling: Any
    detokenizer: Any = None
    leader: Sequence | None = None
    num_computed: int = 0
    num_cached: int = 0
    slot: int = -1
    status: Status = Status.WAITING
    reads_prefix_cache: bool = True
    _digests: dict[int, list[bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.num_prompt

    def digests(self, block_size: int) -> list[bytes]:
        """A digest per full block of tokens; each covers everything before it, so equal digests mean equal prefixes.

        Cryptographic, because a collision would show one user another's text.
        """
        known = self._digests.setdefault(block_size, [])
        while (len(known) + 1) * block_size <= len(self.token_ids):
            begin = len(known) * block_size
            content = array("q", self.token_ids[begin : begin + block_size]).tobytes()
            parent = known[-1] if known else b""
            known.append(hashlib.blake2b(parent + content, digest_size=16).digest())
        return known
