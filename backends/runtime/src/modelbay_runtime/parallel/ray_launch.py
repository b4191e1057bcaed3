"""Ranks as actors of a Ray cluster. Ray places and watches them; what they exchange goes over c10d, as everywhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from modelbay.errors import UsageError
from modelbay.resolve import Resolution
from modelbay_runtime.parallel.launch import Bootstrap, await_words, portable
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.worker import take_place, words_of

_GRACE_S = 10.0


def require_ray() -> Any:
    """Ray, connected to the cluster that this process belongs to, or to one of this machine alone.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "distributed_executor_backend ray needs Ray, which is not installed.",
            hint='pip install "modelbay-runtime[ray]"',
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    return ray


class RayActors:
    """See `modelbay_runtime.parallel.launch.Started`."""

    def __init__(self, ray: Any, resolution: Resolution, mesh: Mesh, host: str, port: int) -> None:
        self._ray = ray
        args, modules = portable(resolution)
        gpus = 1 if torch.cuda.is_available() and resolution.args.device in ("auto", "cuda") else 0
        actor = ray.remote(num_cpus=0 if gpus else 1, num_gpus=gpus, max_restarts=0)(_Rank)
        self._actors, self._runs = [], {}
        for rank in range(1, mesh.size):
            bootstrap = Bootstrap(args, modules, rank, host, port, tuple(sys.path), "")
            self._actors.append(actor.remote())
            self._runs[rank] = self._actors[-1].run.remote(bootstrap)

    def failed(self) -> str | None:
        for rank, run in self._runs.items():
            if self._ray.wait([run], timeout=0)[0]:
                try:
                    words: str | None = self._ray.get(run)
                except Exception as error:  # the actor's process is gone
                    words = f"rank {rank}: {type(error).__name__}: {error}"
                return words or f"rank {rank} ended"
        return None

    def wait_failed(self, seconds: float) -> str | None:
        return await_words(self.failed, seconds)

    def end(self, *, at_once: bool = False) -> None:
        if not self._ray.is_initialized():
            return  # the cluster went, and the actors with it
        if not at_once:
            self._ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=_GRACE_S)
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()


class _Rank:
    """An actor: one rank, until rank 0 closes its model."""

    def run(self, bootstrap: Bootstrap) -> str | None:
        """Serve; returns the words of what ended it, or None."""
        import ray

        try:
            # An actor sees the GPU that Ray gave it, and no other.
            take_place(bootstrap, 1, 0, ray.util.get_node_ip_address())
        except BaseException as error:
            return words_of(bootstrap, error)
        return None
