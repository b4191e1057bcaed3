"""Processes joined into a mesh: c10d's process groups over one store, and none of them global.

The groups are made directly, not through ``init_process_group``: several models in one process each have their own.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from modelbay.errors import EngineError, UsageError
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.groups import Alone, Group, Joined, RankTraffic
from modelbay_runtime.parallel.letting_go import Remembering, wait_until_free
from modelbay_runtime.parallel.mesh import Mesh, Place


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how the ranks meet.

    Attributes:
        store: c10d's. host: this process's address that the others can reach.
        timeout: seconds that one exchange may take.
        backend: "gloo" or "nccl", for what layers exchange; the host's own messages go over gloo.
    """

    store: Any
    host: str
    timeout: float
    backend: str


def pick_backend(wanted: str, device: torch.device) -> str:
    """``auto``: NCCL between GPUs, gloo else.

    Raises:
        UsageError: NCCL without a GPU, or not in this torch.
    """
    if wanted == "auto":
        return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if wanted == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise UsageError(f"distributed_backend nccl needs CUDA devices and a torch with NCCL; this runs on {device}.")
    return wanted


class World:
    """This process among the ranks of a mesh.

    Attributes:
        context: what the modules that are built here know of it.
        control: the group over which rank 0 says what to do.
    """

    def __init__(self, mesh: Mesh, rank: int, meeting: Meeting) -> None:
        self.mesh, self.rank, self._meeting = mesh, rank, meeting
        self._groups: list[Remembering] = []
        self.place: Place = mesh.place(rank)
        everyone = range(mesh.size)
        self.control = self._make("control", everyone, "gloo")
        self._host = self._make("host", everyone, "gloo")
        self._pipe = self._host if meeting.backend == "gloo" else self._make("pipe", everyone, meeting.backend)
        tp = self._own("tp", mesh.tp_groups())
        ep = self._own("ep", mesh.ep_groups())
        local_ranks = self.gather(meeting.host).count(meeting.host)
        self.context = ParallelContext(mesh, self.place, tp, ep, local_ranks)
        self._beside: Pipe | None = None

    def _own(self, name: str, groups: Sequence[Sequence[int]]) -> Group:
        """The group among ``groups`` that this rank belongs to."""
        for ranks in groups:
            if self.rank in ranks and len(ranks) > 1:
                return Joined(ranks, self.rank, self._make(f"{name}{ranks[0]}", ranks, self._meeting.backend))
        return Alone()

    def _make(self, name: str, ranks: Sequence[int], backend: str) -> Any:
        store = dist.PrefixStore(name, self._meeting.store)
        rank, timeout = list(ranks).index(self.rank), timedelta(seconds=self._meeting.timeout)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, len(ranks), options)
        gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's stubs
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=self._meeting.host)]
        group = Remembering(gloo(store, rank, len(ranks), options))
        self._groups.append(group)
        return group

    def let_go(self) -> None:
        """Before this process ends: wait for the threads that may still hold what was sent."""
        wait_until_free(self._groups)

    # ---- objects between hosts -------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. All ranks call it at the same point."""
        payload = _bytes(pickle.dumps(value))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.mesh.size)]
        self._host.allgather([sizes], [torch.tensor([payload.numel()])]).wait()
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        parts = [torch.empty_like(padded) for _ in range(self.mesh.size)]
        self._host.allgather([parts], [padded]).wait()
        return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def to_first(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, at rank 0; elsewhere nothing. All ranks call it at the same point."""
        if self.rank:
            self.send_object(value, 0)
            return []
        return [value, *(self.receive_object(rank) for rank in range(1, self.mesh.size))]

    def send_object(self, value: Any, rank: int) -> None:
        payload = _bytes(pickle.dumps(value))
        self._host.send([torch.tensor([payload.numel()])], rank, 1).wait()
        self._host.send([payload], rank, 1).wait()

    def receive_object(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._host.recv([size], rank, 1).wait()
        payload = torch.empty(int(size), dtype=torch.uint8)
        self._host.recv([payload], rank, 1).wait()
        return pickle.loads(payload.numpy().tobytes())

    def traffic(self) -> RankTraffic:
        """What this rank gave to others so far."""
        tp, ep = copy.deepcopy((self.context.tp.traffic, self.context.ep.traffic))  # which go on counting
        return RankTraffic(tp, ep, self._pipe_bytes())

    def neighbours(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Pipe | None:
        """The stages beside this one; None where there is one stage."""
        if self.mesh.pp > 1:
            # gloo sends from the CPU alone.
            wire = torch.device("cpu") if self._meeting.backend == "gloo" else device
            self._beside = Pipe(self, self._pipe, hidden_size, dtype, device, wire)
        return self._beside

    def _pipe_bytes(self) -> int:
        return self._beside.sent_bytes if self._beside is not None else 0


@dataclass(slots=True)
class Pipe:
    """Hidden states from stage to stage, each share's to the same share. See `engine.runner.Neighbours`.

    Sending does not wait for the next stage to take them: it may still be at work on the round before.

    Attributes:
        device: of the hidden states; ``wire``: where they are sent from and received.
        sent_bytes: what this rank gave to the stage after it.
    """

    world: World
    group: Any
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    wire: torch.device
    sent_bytes: int = 0
    _sending: deque[tuple[torch.Tensor, Any]] = field(default_factory=deque)

    def receive(self, tokens: int) -> torch.Tensor | None:
        place = self.world.place
        if place.pp_rank == 0:
            return None
        hidden = torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.wire)
        self.group.recv([hidden], self._rank(place.pp_rank - 1), 0).wait()
        return hidden.to(self.device)

    def send(self, hidden: torch.Tensor) -> None:
        """Raises:
        EngineError: hidden states of another size or dtype than the next stage expects.
        """
        if hidden.shape[1:] != (self.hidden_size,) or hidden.dtype != self.dtype:
            raise EngineError(
                f"the stage gave hidden states {list(hidden.shape)} in {hidden.dtype}; the next one expects "
                f"[{hidden.shape[0]}, {self.hidden_size}] in {self.dtype}."
            )
        while self._sending and (self._sending[0][1].is_completed() or len(self._sending) > self.world.mesh.pp):
            self._sending.popleft()[1].wait()
        hidden = hidden.to(self.wire).contiguous()
        self.sent_bytes += hidden.numel() * hidden.element_size()
        self._sending.append((hidden, self.group.send([hidden], self._rank(self.world.place.pp_rank + 1), 0)))

    def _rank(self, pp_rank: int) -> int:
        place = self.world.place
        return self.world.mesh.rank(Place(place.dp_rank, pp_rank, place.tp_rank))


def _bytes(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
