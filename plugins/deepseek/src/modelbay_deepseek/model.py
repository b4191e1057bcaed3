"""The DeepSeek family: latent attention (V2, V3) and many small experts beside shared ones (all).

DeepSeekMoE (Dai et al., 2024), V2 (DeepSeek-AI, 2024a), V3 (DeepSeek-AI, 2024b). Legend: T tokens, H hidden size,
N heads, P head size without position, R rotary size, E value head size, C latent size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from modelbay.config import ModelConfig
from modelbay.errors import ConfigError
from modelbay.rope import RopeSpec
from modelbay_deepseek.attention import LatentSpec
from modelbay_deepseek.routing import routing_spec
from modelbay_runtime.api import BuildContext, LatentKV, Step
from modelbay_runtime.layers.attention import SelfAttention
from modelbay_runtime.layers.decoder import CausalLM, Decoder, DecoderLayer
from modelbay_runtime.layers.linear import Linear, parameter
from modelbay_runtime.layers.moe import SparseMoE
from modelbay_runtime.layers.norm import RMSNorm
from modelbay_runtime.layers.rotary import Rotary
from modelbay_runtime.layers.rotary_frequencies import yarn_mscale
from modelbay_runtime.layout import Shard

#: Of the norms between a projection down and the one up again, whatever ``rms_norm_eps`` says.
_LATENT_EPS = 1e-6


def softmax_scale(config: ModelConfig, rope: RopeSpec) -> float:
    """``1 / sqrt(P + R)``, and with yarn times the square of its correction for ``mscale_all_dim``.

    The correction on cos and sin is a ratio of two such, one where both are equal, so that this one does the work.
    """
    scale = (config.get("qk_nope_head_dim") + config.get("qk_rope_head_dim")) ** -0.5
    all_dim = rope.parameters.get("mscale_all_dim") if rope.type != "default" else None
    return scale * yarn_mscale(rope.parameters["factor"], all_dim) ** 2 if all_dim else scale


def rotary_spec(config: ModelConfig) -> RopeSpec:
    """RoPE of the part of a head that turns."""
    rope = config.rope_for("mla")
    if rope is None:
        raise ConfigError(f"{config.model_type}: latent attention needs RoPE, and the config has none.")
    return replace(rope, rotary_dim=config.get("qk_rope_head_dim"))


class LatentAttention(nn.Module):
    """Queries through a low rank or directly, one latent and one rotated key for all heads, attention, projection.

    Ranks that share it have some heads each. What is for all heads (the low rank, latent and rotated key, and so the
    cache) is whole on each.
    """

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        config, self.layer = build.config, layer
        hidden, heads = config.hidden_size, config.num_heads
        nope, rope = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
        latent, value, q_rank = config.get("kv_lora_rank"), config.get("v_head_dim"), config.get("q_lora_rank")
        bias = bool(config.get("attention_bias", False))
        local_heads = build.parallel.divide(heads, "num_attention_heads")
        self.spec = LatentSpec(local_heads, nope, rope, value, latent, softmax_scale(config, rotary_spec(config)))
        self.kv_spec = LatentKV(latent + rope)
        self.low_rank = q_rank is not None
        if self.low_rank:
            self.q_a_proj = Linear(build, hidden, q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(build, q_rank, _LATENT_EPS)
            self.q_b_proj = Linear(build, q_rank, heads * (nope + rope), style="colwise")
        else:
            self.q_proj = Linear(build, hidden, heads * (nope + rope), style="colwise")
        self.kv_a_proj_with_mqa = Linear(build, hidden, latent + rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(build, latent, _LATENT_EPS)
        self.kv_b_proj = _HeadWeights(build, local_heads, nope + value, latent)
        self.o_proj = Linear(build, heads * value, hidden, bias=bias, style="rowwise")
        layout = "rotary_interleaved" if interleaved(config) else "rotary"
        self.rotary = build.op(layout, size=rope)
        self.write = build.op("write_cache")
        self.attend = build.op(
            "attention.mla", layer=layer, num_heads=local_heads, head_size=latent + rope, v_head_size=latent
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step, residual: torch.Tensor
    ) -> torch.Tensor:
        """x, residual: [T, H]; cos, sin: [T, 1, R] -> [T, H]."""
        spec, cache, group = self.spec, step.caches[self.layer], step.groups[self.layer]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank else self.q_proj(x)
        q = q.unflatten(1, (spec.num_heads, -1))
        rows = self.kv_a_proj_with_mqa(x)
        latent = rows[:, : spec.latent_size]
        latent.copy_(self.kv_a_layernorm(latent))
        self.rotary(q[..., spec.nope_size :], cos, sin)
        self.rotary(rows[:, None, spec.latent_size :], cos, sin)
        self.write(rows, cache, group.slots)
        out = self.attend(q, rows, cache, step, group, spec, self.kv_b_proj.by_head())
        return self.o_proj(out.flatten(1), residual)


class _HeadWeights(nn.Module):
    """A projection's weight by head, which attention multiplies from either side; nothing is packed."""

    style = "colwise"

    def __init__(self, build: BuildContext, heads: int, size: int, latent: int) -> None:
        super().__init__()
        self.heads = heads
        rows, parallel = heads * size, build.parallel
        self.weight = parameter((rows, latent), build.dtype)
        self.shards: dict[str, Shard] = {}
        if parallel.tp_size > 1:
            self.shards["weight"] = Shard(0, parallel.tp_rank * rows, rows, total=parallel.tp_size * rows)

    def by_head(self) -> torch.Tensor:
        """[N, P + E, C]."""
        return self.weight.unflatten(0, (self.heads, -1))


def interleaved(config: ModelConfig) -> bool:
    return bool(config.get("rope_interleave", True))


class DeepseekLayer(DecoderLayer):
    """Llama's layer, with experts where the config puts them."""

    def make_mlp(self, build: BuildContext, layer: int) -> nn.Module:
        config = build.config
        first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
        if config.get("n_routed_experts") is None or layer < first or layer % every:
            return super().make_mlp(build, layer)
        size = config.get("moe_intermediate_size")
        return SparseMoE(
            build,
            config.hidden_size,
            size,
            config.get("hidden_act"),
            routing_spec(config),
            corrected=config.get("topk_method") == "noaux_tc",
            shared_intermediate_size=size * config.get("n_shared_experts", 0),
        )

    def make_attention(self, build: BuildContext, layer: int) -> nn.Module:
        bias = bool(build.config.get("attention_bias", False))
        return SelfAttention(build, layer, qkv_bias=bias, o_bias=bias)


class LatentLayer(DeepseekLayer):
    def make_attention(self, build: BuildContext, layer: int) -> nn.Module:
        return LatentAttention(build, layer)


class LatentDecoder(Decoder):
    def make_rotary(self, build: BuildContext, rope: RopeSpec) -> nn.Module:
        return Rotary(build, rotary_spec(build.config), interleaved=interleaved(build.config))


class DeepseekForCausalLM(CausalLM):
    layer_class = DeepseekLayer


class DeepseekV2ForCausalLM(CausalLM):
    decoder_class = LatentDecoder
    layer_class = LatentLayer


class DraftLayer(LatentLayer):
    """A module for multi-token prediction (V3, section 2.2): from what the model made of position p and the embedding
    of token p + 1 to what the head makes the prediction of token p + 2 of. Embedding and head are the model's own."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        config = build.config
        super().__init__(replace(build, config=replace(config, layer_types=(*config.layer_types, "mla"))), layer)
        hidden, eps = config.hidden_size, config.get("rms_norm_eps", 1e-6)
        self.enorm, self.hnorm = RMSNorm(build, hidden, eps), RMSNorm(build, hidden, eps)
        self.eh_proj = Linear(build, 2 * hidden, hidden)
        self.eh_proj.hold_blocks = None  # type: ignore[method-assign, assignment]  # left in 16 bits by checkpoints
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(build, hidden, eps)})

    def draft(
        self, hidden: torch.Tensor, embeds: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """hidden, embeds: [T, H] -> [T, H]."""
        both = torch.cat((self.enorm(embeds), self.hnorm(hidden)), -1)
        return self(self.eh_proj(both), cos, sin, step)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """V2's blocks; what differs is how experts are chosen, and that is in the config. And a layer to draft with, which
    is the one behind the last."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.can_draft = bool(build.draft_tokens and config.get("num_nextn_predict_layers"))
        if self.can_draft:
            self.model.layers.append(DraftLayer(build, config.num_layers))

    def draft(self, hidden: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """What the model made of positions, [R, H], and the tokens after them, [R] -> [R, H]."""
        layer: Any = self.model.layers[-1]
        return layer.draft(hidden, self.model.embed_tokens(input_ids), *self.model.rotary_emb(positions), step)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V]."""
        layer: Any = self.model.layers[-1]
        return self.logits(layer.shared_head["norm"](hidden))
