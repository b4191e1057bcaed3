"""Into how many ranks the layers of a model can be sliced: asked of whoever would slice them, on meta."""

from __future__ import annotations

import dataclasses

from modelbay.resolve import Resolution
from modelbay.trace import Trace
from modelbay_runtime.build import BuiltModel, build_model
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.sizes import TensorParallelSize, tensor_parallel_sizes

#: Sizes up to this one are tried, as many as one machine has devices: each costs seconds where a large model of
#: Transformers is simulated. Larger ones are those that the config's numbers allow.
TRIED = 8


def undivided(resolution: Resolution, tensor_parallel_size: int = 1) -> Resolution:
    """The same model in one process, or its layers sliced and nothing else, with a trace of its own."""
    args = resolution.args.replace(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
    )
    return dataclasses.replace(resolution, args=args, trace=Trace())


def slices(resolution: Resolution, built: BuiltModel | None) -> list[TensorParallelSize]:
    """The sizes that the config's numbers allow, smallest first, without those up to `TRIED` that are refused.

    Args:
        built: the first rank's module, divided as the arguments say, if it is one that can be divided so.
    """
    known = {1}
    if built is not None and built.context.parallel.mesh == Mesh(tp=resolution.args.tensor_parallel_size):
        known.add(resolution.args.tensor_parallel_size)
    sizes = tensor_parallel_sizes(resolution.config)
    return [each for each in sizes if each.size in known or each.size > TRIED or _goes(resolution, each.size)]


def _goes(resolution: Resolution, size: int) -> bool:
    """Whether the model can be built so. Code that breaks while it slices slices nothing."""
    try:
        build_model(undivided(resolution, size))
    except Exception:
        return False
    return True
