"""Qwen2 (Yang et al., 2024): the decoder of the runtime's blocks, with a bias on q, k and v and none on the output."""

from __future__ import annotations

from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.attention import SelfAttention
from modelbay_runtime.layers.decoder import CausalLM, DecoderLayer


class Qwen2Layer(DecoderLayer):
    def make_attention(self, build: BuildContext, layer: int) -> nn.Module:
        return SelfAttention(build, layer, qkv_bias=True)


class Qwen2ForCausalLM(CausalLM):
    layer_class = Qwen2Layer
