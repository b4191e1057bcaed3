"""Llama (Touvron et al., 2023): the decoder of the runtime's blocks. Mistral (Jiang et al., 2023): with a window.

What differs from the blocks is whether the projections carry a bias, which some descendants of Llama do.
"""

from __future__ import annotations

from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.attention import SelfAttention
from modelbay_runtime.layers.decoder import CausalLM, DecoderLayer


class LlamaLayer(DecoderLayer):
    def make_attention(self, build: BuildContext, layer: int) -> nn.Module:
        bias = bool(build.config.get("attention_bias", False))
        return SelfAttention(build, layer, qkv_bias=bias, o_bias=bias)


class LlamaForCausalLM(CausalLM):
    layer_class = LlamaLayer


class MistralForCausalLM(CausalLM):
    """Windows come from the config: every layer whose type is "sliding" sees ``sliding_window`` tokens."""
