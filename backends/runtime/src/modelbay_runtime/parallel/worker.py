"""A rank other than the first: does what it is told until it is told to end.

``python -m modelbay_runtime.parallel FILE`` is how the first rank starts one.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import torch

from modelbay.errors import ModelbayError
from modelbay.resolve import Resolution, resolve_args
from modelbay_runtime.build import pick_device
from modelbay_runtime.engine.batch import Batch, idle_batch
from modelbay_runtime.engine.rank import Rank
from modelbay_runtime.engine.runner import BatchOutput, Runner
from modelbay_runtime.parallel.channel import Listener
from modelbay_runtime.parallel.launch import LOCALHOST, LOST, Bootstrap, joined_store
from modelbay_runtime.parallel.member import Member, ThreadShare, place_device
from modelbay_runtime.parallel.mesh import Mesh


def serve(resolution: Resolution, mesh: Mesh, number: int, store: Any, host: str) -> None:
    """Load this rank's part and compute what rank 0 says, until it says that it is over."""
    device = pick_device(resolution.args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are started on the current device, whatever their tensors' is
    member = Member(resolution, mesh, number, store, host)
    listener = Listener(member.world.control, _lost)
    rank, runner = member.load()
    lane = member.world.place.dp_rank
    for command in listener.commands():
        match command:
            case ("round", batches):
                _compute(member, runner, batches, lane)
            case ("clear",):
                rank.cache.clear()
            case ("traffic",):
                member.world.to_first(member.world.traffic())
            case ("apply", payload):
                member.world.to_first(applied(payload, rank))
    member.world.let_go()


def _compute(member: Member, runner: Runner, batches: list[Batch | None], lane: int) -> None:
    batch, mesh = batches[lane], member.mesh
    output = run_lane(runner, mesh, batch)
    if batch is not None and lane and member.number == mesh.leader(lane):
        assert output is not None, "a leader is on the last stage"
        member.world.send_object(_portable(output), 0)


def run_lane(runner: Runner, mesh: Mesh, batch: Batch | None) -> BatchOutput | None:
    """A lane that has nothing to do computes all the same where its experts serve other lanes."""
    if batch is None:
        if mesh.expert_parallel and mesh.dp > 1:
            runner.run(idle_batch(runner.cache.layout))
        return None
    return runner.run(batch)


def _portable(output: BatchOutput) -> BatchOutput:
    """What rank 0 needs of another replica's output, on the CPU."""
    return dataclasses.replace(output, logits=None if output.logits is None else output.logits.cpu(), hidden=None)


def applied(payload: bytes, rank: Rank) -> bytes:
    """Whether a pickled function ran on this rank's module, and its result or what it raised: a pickled pair."""
    try:
        # By value, as the function came: its classes may exist in the user's program alone.
        return bytes(cloudpickle.dumps((True, pickle.loads(payload)(rank.model))))
    except Exception as error:
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))


def _lost(error: BaseException) -> None:
    """Rank 0 is gone: whatever this process is doing is for nobody."""
    print(f"modelbay: this rank ends, it does not hear rank 0 any more: {error}", file=sys.stderr, flush=True)
    os._exit(LOST)


def take_place(bootstrap: Bootstrap, local_ranks: int, local_rank: int, host: str) -> None:
    """Resolve the model here, and serve as the rank that the bootstrap says.

    Args:
        local_ranks: ranks of this machine. local_rank: this one's number among them. host: this machine's address.
    """
    sys.path[:] = [*bootstrap.path, *(path for path in sys.path if path not in bootstrap.path)]
    args = bootstrap.args
    if bootstrap.module_plugins:
        modules = [importlib.import_module(name) for name in bootstrap.module_plugins]
        args = args.replace(plugins=[*(args.plugins or ()), *modules])
    mesh = Mesh.of(args)
    ThreadShare(local_ranks)
    resolution = place_device(resolve_args(args), local_rank)
    store = joined_store(bootstrap.host, bootstrap.port, mesh.size, args.distributed_timeout_seconds)
    serve(resolution, mesh, bootstrap.rank, store, host)


def words_of(bootstrap: Bootstrap, error: BaseException) -> str:
    """What a rank that ends has to say: what no error of ours explains comes with its traceback."""
    place = Mesh.of(bootstrap.args).place(bootstrap.rank)
    words = f"rank {bootstrap.rank} ({place}) ended: {type(error).__name__}: {error}"
    if not isinstance(error, ModelbayError):
        words += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return words


def main(file: str) -> None:
    """Take the place that the file names; the words of whatever ends this rank are left where rank 0 looks for them."""
    bootstrap: Bootstrap = pickle.loads(Path(file).read_bytes())
    try:
        take_place(bootstrap, Mesh.of(bootstrap.args).size, bootstrap.rank, LOCALHOST)
    except BaseException as error:
        _leave_word(bootstrap, error)
        _exit(1)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """Not a return: threads of c10d may wait for ranks that wait for this one."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _leave_word(bootstrap: Bootstrap, error: BaseException) -> None:
    words, unfinished = words_of(bootstrap, error), Path(bootstrap.folder, f".error-{bootstrap.rank}")
    try:
        unfinished.write_text(words)
        unfinished.rename(unfinished.with_name(f"error-{bootstrap.rank}"))
    except OSError:
        print(words, file=sys.stderr)
