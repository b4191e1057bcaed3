"""The decoder-only language model that most families are a small change of.

A family states its difference as a class attribute or by overriding one method. Module names are the checkpoint's.
Legend: T tokens, R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from modelbay.config import ModelConfig
from modelbay.errors import ConfigError
from modelbay.plans import split_stages
from modelbay.rope import RopeSpec
from modelbay.weights.matching import ANOTHER_STAGE
from modelbay_runtime.api import BuildContext, KVSpec, Step
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.layers.attention import SelfAttention
from modelbay_runtime.layers.embedding import Embedding, Head
from modelbay_runtime.layers.mlp import GatedMLP
from modelbay_runtime.layers.norm import RMSNorm
from modelbay_runtime.layers.rotary import Rotary


class DecoderLayer(nn.Module):
    """Norm, attention, norm, gated MLP, each with its residual (pre-norm)."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        config = build.config
        eps = config.get("rms_norm_eps", 1e-6)
        self.layer_type = config.layer_types[layer]
        self.input_layernorm = RMSNorm(build, config.hidden_size, eps)
        self.self_attn = self.make_attention(build, layer)
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, eps)
        self.mlp = self.make_mlp(build, layer)

    def make_attention(self, build: BuildContext, layer: int) -> nn.Module:
        return SelfAttention(build, layer)

    def make_mlp(self, build: BuildContext, layer: int) -> nn.Module:
        config = build.config
        if config.intermediate_size is None:
            raise ConfigError(f"{config.model_type}: the MLP needs one intermediate_size, and the config has none.")
        activation = config.get("hidden_act", "silu")
        return GatedMLP(
            build, config.hidden_size, config.intermediate_size, activation, bias=bool(config.get("mlp_bias", False))
        )

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step) -> torch.Tensor:
        hidden = self.self_attn(self.input_layernorm(hidden), cos, sin, step, hidden)
        return self.mlp(self.post_attention_layernorm(hidden), hidden)


class Decoder(nn.Module):
    """Embedding, layers, final norm; of a pipeline's stage, those that it has.

    The embedding is on the first stage, the norm on the last. Layers keep their numbers in the whole model.
    """

    def __init__(self, build: BuildContext, layer_class: type[DecoderLayer]) -> None:
        super().__init__()
        config = build.config
        rope = config.rope_for("default")
        if rope is None:
            raise ConfigError(f"{config.model_type}: the decoder blocks need RoPE, and the config has none.")
        parallel = build.parallel
        own = split_stages(config.num_layers, parallel.mesh.pp)[parallel.place.pp_rank]
        self.embed_tokens: nn.Module = Absent(ANOTHER_STAGE)
        if parallel.is_first_stage:
            self.embed_tokens = Embedding(build, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            layer_class(build, layer) if layer in own else Absent(ANOTHER_STAGE) for layer in range(config.num_layers)
        )
        self.own_layers, self.is_last_stage = own, parallel.is_last_stage
        self.norm: nn.Module = Absent(ANOTHER_STAGE)
        if parallel.is_last_stage:
            self.norm = RMSNorm(build, config.hidden_size, config.get("rms_norm_eps", 1e-6))
        self.rotary_emb = self.make_rotary(build, rope)

    def make_rotary(self, build: BuildContext, rope: RopeSpec) -> nn.Module:
        return Rotary(build, rope)

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, step: Step, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cos, sin = self.rotary_emb(positions)
        for layer in islice(self.layers, self.own_layers.start, self.own_layers.stop):
            hidden = layer(hidden, cos, sin, step)
        return self.norm(hidden) if self.is_last_stage else hidden


class CausalLM(nn.Module):
    """A decoder with a head: the model contract for ``…ForCausalLM``."""

    decoder_class: type[Decoder] = Decoder
    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.model = self.decoder_class(build, self.layer_class)
        is_first, is_last = build.parallel.is_first_stage, build.parallel.is_last_stage
        tied_to = "model.embed_tokens.weight" if config.tie_word_embeddings and is_first else None
        self.lm_head: nn.Module = Absent(ANOTHER_STAGE, tied_to)
        if is_last:
            self.lm_head = Head(build, config.hidden_size, config.vocab_size, tied_to=tied_to)
            if not is_first:  # nothing is looked up here, so a tied weight need only be what the head makes of it
                self.model.embed_tokens = Absent(ANOTHER_STAGE, "lm_head.weight")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: Step,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids (or [T, H] embeddings) and [T] positions -> [T, H].

        A later stage of a pipeline takes what the one before it returned as ``inputs_embeds``.
        """
        return self.model(input_ids, positions, step, inputs_embeds)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V], on the last stage."""
        return self.lm_head(hidden)

    def kv_specs(self) -> Mapping[int, KVSpec]:
        keeping: list[Any] = [module for module in self.modules() if hasattr(module, "kv_spec")]
        return {module.layer: module.kv_spec for module in keeping}
