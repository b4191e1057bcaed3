"""Requests and the sequences they run as: one prompt, ``n`` continuations."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import Enum

import torch

from modelbay_runtime.engine.detokenizer import TextStream
from modelbay_runtime.engine.outputs import Logprob, TokenLogprobs
from modelbay_runtime.engine.sampling_state import SamplingState
from modelbay_runtime.multimodal.plan import MediaPlan
from modelbay_runtime.pooling.plan import PoolingPlan


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a prompt.

    Attributes:
        token_ids: prompt and output so far; ``output_ids``: the output alone, the list that the sampler reads.
        leader: the sibling whose prompt blocks this one waits for, when a request has several.
        reads_prefix_cache: off when the logits of every prompt token are wanted.
        num_computed: tokens whose cache rows are written.
        num_cached: tokens that the prefix cache had when the sequence was first admitted.
        lane: the replica that computes it.
        in_flight: whether a step that computes its tokens is under way.
        slot: row of the block tables while it runs, -1 otherwise.
        prompt_logprobs: of prompt tokens 1, 2, …, as far as they are computed.
        token_types: of a pair of texts, the number of each token's text.
        media: its images and audio, if it has any.
        speculates: whether tokens may be guessed; drafts_next: whether the next step can, since the last one left what
            it takes. num_drafts: guesses so far; num_accepted: those that were the token drawn.
        pooling: what is made of its hidden states (``sampling`` is None then); pooled: what was made.
    """

    request_id: str
    index: int
    num_prompt: int
    token_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    sampling: SamplingState | None = None
    text: TextStream | None = None
    leader: Sequence | None = None
    reads_prefix_cache: bool = True
    num_computed: int = 0
    num_cached: int | None = None
    num_preemptions: int = 0
    lane: int = 0
    in_flight: bool = False
    slot: int = -1
    status: Status = Status.WAITING
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    shown_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_types: list[int] | None = None
    media: MediaPlan | None = None
    pooling: PoolingPlan | None = None
    pooled: torch.Tensor | None = None
    speculates: bool = False
    drafts_next: bool = False
    num_drafts: int = 0
    num_accepted: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _digests: dict[int, list[bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)

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
            if self.media is not None:
                content += self.media.content(begin, begin + block_size)
            parent = known[-1] if known else b""
            known.append(hashlib.blake2b(parent + content, digest_size=16).digest())
        return known
