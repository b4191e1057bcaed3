"""Forms of ops that are quicker on a CPU than the reference, where a few rows make every call mostly overhead."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from modelbay_runtime.kernels import ops

#: Beyond this many rows the reference, whose work is half, is the quicker one (measured for H 576 and 896).
_FEW_ROWS = 2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `modelbay_runtime.kernels.ops.rms_norm`.

    torch has a fused layer norm for CPU, and puts an RMS norm together from eight ops. The mean of ``[x, -x]`` is zero
    and its variance the mean square of x, so the layer norm of that is the RMS norm of x, and of -x behind it.
    """
    if x.numel() > _FEW_ROWS * x.shape[-1]:
        return ops.rms_norm(x, weight, eps)
    size = x.shape[-1]
    both = F.layer_norm(torch.cat((x, -x), -1), (2 * size,), None, None, eps)
    return both[..., :size] * weight
