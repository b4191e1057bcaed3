"""TinyLM: the decoder of the runtime's blocks with a scale on the embeddings and a divisor on the logits.

Legend: T tokens, H hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from modelbay.config import ModelConfig
from modelbay_runtime.api import BuildContext, Step
from modelbay_runtime.layers.decoder import CausalLM


class AcmeForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.embedding_scale = float(config.get("embedding_scale"))
        self.logit_divisor = float(config.get("logit_divisor"))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: Step,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids (or [T, H] embeddings) and [T] positions -> [T, H]."""
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids) * self.embedding_scale
        return super().forward(None, positions, step, inputs_embeds)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V]."""
        return super().logits(hidden) / self.logit_divisor


class AcmeLlama(CausalLM):
    """Acme's own Llama, to show that a plugin may serve a name that another one serves too."""
