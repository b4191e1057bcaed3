"""Attention: the paged layer, and the standard block of projections around it.

Legend: T tokens, H hidden size, N query heads, K kv heads, D head size, E value head size.
"""

from __future__ import annotations

import torch
from torch import nn

from modelbay_runtime.api import BuildContext, FullKV, KVSpec, NoKV, SlidingKV, Step
from modelbay_runtime.kernels.attention import AttentionSpec
from modelbay_runtime.kernels.attention import attention as attention_with_spans
from modelbay_runtime.layers.linear import Linear, PackedLinear
from modelbay_runtime.parallel.sizes import share_of


class Attention(nn.Module):
    """One attention layer: "full" or "sliding" over the paged cache, or "encoder" without one; returns [T, N * E].

    Args:
        layer: index that tells this layer's cache from others'.
        window: keys a query sees, itself included; makes the layer "sliding". An encoder's looks both ways.
        causal: False makes it an encoder's layer, which keeps nothing.
        has_sinks: whether `forward` is given sinks.
    """

    def __init__(
        self,
        build: BuildContext,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        scale: float,
        v_head_size: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        v_head_size = v_head_size or head_size
        self.layer = layer
        self.spec = AttentionSpec(num_heads, num_kv_heads, head_size, v_head_size, scale, window, softcap)
        self.kv_spec: KVSpec = NoKV()
        kind = "encoder"
        if causal and window is None:
            self.kv_spec, kind = FullKV(num_kv_heads, head_size, v_head_size), "full"
        elif causal and window is not None:
            self.kv_spec, kind = SlidingKV(num_kv_heads, head_size, v_head_size, window), "sliding"
        self.write = build.op("write_cache") if causal else None
        self.attend = build.op(
            f"attention.{kind}",
            layer=layer, head_size=head_size, v_head_size=v_head_size, num_heads=num_heads, num_kv_heads=num_kv_heads,
            window=window, softcap=softcap, sinks=has_sinks,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, rows: torch.Tensor, step: Step, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q: [T, N, D]; rows: [T, K * (D + E)], keys then values; sinks: [N] or None -> [T, N * E]."""
        if self.write is None:
            return self.attend(q, rows, None, step, None, self.spec, sinks).flatten(1)
        cache, group = step.caches[self.layer], step.groups[self.layer]
        self.write(rows, cache, group.slots)
        # Images whose tokens see each other both ways are rare: the reference alone knows them.
        attend = self.attend if step.spans is None else attention_with_spans
        return attend(q, rows, cache, step, group, self.spec, sinks).flatten(1)


class SelfAttention(nn.Module):
    """q, k, v in one product, rotation in place, paged attention, output projection with the residual added.

    ``self_attn.q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` are the logical names.
    """

    def __init__(self, build: BuildContext, layer: int, *, qkv_bias: bool = False, o_bias: bool = False) -> None:
        super().__init__()
        config, parallel = build.config, build.parallel
        self.head_size = config.head_size
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.num_heads = parallel.divide(heads, "num_attention_heads")
        # Fewer KV heads than ranks: each has the one that its query heads ask.
        self.num_kv_heads = share_of(
            kv_heads, parallel.tp_rank, parallel.tp_size, "num_key_value_heads", heads=kv_heads
        ).size
        q_size, kv_size = heads * self.head_size, kv_heads * self.head_size
        self.qkv_proj = PackedLinear(
            build,
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=qkv_bias,
            heads={"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads},
        )
        self.o_proj = Linear(build, q_size, config.hidden_size, bias=o_bias, style="rowwise")
        self.rotary = build.op("rotary", size=self.head_size)
        sliding = config.layer_types[layer] == "sliding"
        self.attention = Attention(
            build, layer, self.num_heads, self.num_kv_heads, self.head_size,
            scale=self.head_size**-0.5, window=config.sliding_window if sliding else None,
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step, residual: torch.Tensor
    ) -> torch.Tensor:
        """x, residual: [T, H]; cos, sin: [T, 1, R] -> [T, H]."""
        qkv = self.qkv_proj(x)
        q_size = self.num_heads * self.head_size
        turning = self.num_heads + self.num_kv_heads
        heads = qkv[:, : turning * self.head_size].unflatten(1, (turning, self.head_size))
        self.rotary(heads, cos, sin)
        return self.o_proj(self.attention(heads[:, : self.num_heads], qkv[:, q_size:], step), residual)
