"""Third file of the chain: modeling_lumen imports attention_lumen, which imports this one."""

import torch
from torch import nn


class LumenRotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        theta, size = config.rope_parameters["rope_theta"], config.head_dim
        frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x, cos, sin):
    """Interleaved pairs: x is [B, N, T, D], cos and sin are [B, T, D / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
