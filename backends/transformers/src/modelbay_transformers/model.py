"""The modules that the runner sees: Transformers' model inside, the model contract outside.

Legend: T tokens, R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from modelbay.errors import EngineError, ModelbayError, one_line
from modelbay_runtime.api import KVSpec, Step
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.layers.embedding import Head
from modelbay_transformers.attention import StepHolder
from modelbay_transformers.base_output import BaseOutput
from modelbay_transformers.positions import PaddedNumbering, give_positions, numbered
from modelbay_transformers.probe_run import fixed_arguments
from modelbay_transformers.stages import PipelineStage


class TransformersModel(nn.Module):
    """A base model: hidden states.

    Args:
        numbering: how this model numbers its tokens, where it does not count them all (RoBERTa leaves out padding).

    Attributes:
        refused_tokens: ids that no prompt may have, with the reason.
    """

    refused_tokens: Mapping[int, str]

    #: Rows of the model's position table, if it has one.
    max_positions: int | None = None
    #: Of a pipeline; None if the model is whole.
    stage: PipelineStage | None = None

    def __init__(
        self,
        base: nn.Module,
        kv_specs: Mapping[int, KVSpec],
        holder: StepHolder,
        *,
        numbering: PaddedNumbering | None = None,
    ) -> None:
        super().__init__()
        self._modules.update(base._modules)
        self._parameters.update(base._parameters)
        self._buffers.update(base._buffers)
        self._non_persistent_buffers_set = base._non_persistent_buffers_set
        self._set_up(base, kv_specs, holder, numbering)

    def _set_up(
        self, base: nn.Module, kv_specs: Mapping[int, KVSpec], holder: StepHolder, numbering: PaddedNumbering | None
    ) -> None:
        # In a tuple, so that torch does not count its parameters a second time under another name.
        self._base = (base,)
        self._takes_types = "token_type_ids" in inspect.signature(base.forward).parameters
        self._kv_specs = dict(kv_specs)
        self._holder = holder
        self._numbering = numbering
        self.refused_tokens = {} if numbering is None or numbering.whole else {numbering.padding_idx: _counted(base)}
        self._fixed = fixed_arguments(base)

    @property
    def base(self) -> nn.Module:
        """Transformers' own base model."""
        return self._base[0]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: Step,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids (or [T, H] embeddings) and [T] positions (or [P, T], several of each token) -> [T, H].

        A later stage of a pipeline takes what the one before it returned as ``inputs_embeds``.
        """
        self._holder.current = step
        positions = positions if self._numbering is None else self._numbering(positions, input_ids)
        positions = positions[None] if positions.ndim == 1 else positions[:, None]
        inputs: dict[str, Any] = give_positions(self.base, positions)
        if self.stage is not None and not self.stage.is_first:
            assert inputs_embeds is not None, "a later stage is given what the one before it returned"
            self.stage.received = inputs_embeds[None]
            inputs["input_ids"] = positions.new_zeros(1, inputs_embeds.shape[0])
        elif inputs_embeds is None:
            assert input_ids is not None, "a forward has ids or embeddings"
            inputs["input_ids"] = input_ids[None]
        else:
            inputs |= self._embedded(inputs_embeds)
        if step.token_types is not None and self._takes_types:
            inputs["token_type_ids"] = step.token_types[None]
        try:
            with numbered(self.base, positions):
                return self.base(**inputs, **self._fixed)[0][0]
        except (ModelbayError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            name, kind = type(self.base).__name__, type(error).__name__
            raise EngineError(f"{name} raised {kind} in its forward: {one_line(error)}") from error
        finally:
            if self.stage is not None:
                self.stage.received = None
            self._holder.current = None  # a step holds the cache, which may be made anew before the next one

    def _embedded(self, inputs_embeds: torch.Tensor) -> dict[str, Any]:
        """The base model's arguments for embeddings [T, H]."""
        return {"inputs_embeds": inputs_embeds[None]}

    def kv_specs(self) -> Mapping[int, KVSpec]:
        return self._kv_specs


def _counted(base: nn.Module) -> str:
    """Why a prompt may have no padding in it."""
    return f"is padding, which {type(base).__name__} leaves out when it numbers tokens; none of it is counted here"


class TransformersForCausalLM(TransformersModel):
    """A language model whose logits are computed by Transformers' own class, so that whatever it does to them (scaling,
    soft-cap, a bias, a projection) is done: its base is replaced by one that hands over the hidden states.

    Parameters have the names that the class gives them.
    """

    def __init__(
        self, head: nn.Module, prefix: str, kv_specs: Mapping[int, KVSpec], holder: StepHolder, **kwargs: Any
    ) -> None:
        nn.Module.__init__(self)
        base = head._modules[prefix]
        assert base is not None, "the class holds its base model"
        self._modules.update(head._modules)
        self._parameters.update(head._parameters)
        self._buffers.update(head._buffers)
        self._set_up(base, kv_specs, holder, kwargs.get("numbering"))
        head._modules[prefix] = self._hand_over = HandOver()
        self._head = (head,)
        del self._modules["_hand_over"]
        self.__dict__["_hand_over"] = head._modules[prefix]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V]."""
        self._hand_over.hidden = hidden[None]
        ids = hidden.new_zeros((1, hidden.shape[0]), dtype=torch.long)
        return self._head[0](input_ids=ids, use_cache=False, return_dict=True).logits[0]


class TransformersWithHead(TransformersModel):
    """A base model without a class around it (``auto_map.AutoModel`` alone), and a plain head over the vocabulary.

    Parameters of the base are under ``model.``, the head's is ``lm_head.weight``, as Transformers' classes have it.
    """

    def __init__(
        self, base: nn.Module, head: Head | Absent, scale: float, kv_specs: Mapping[int, KVSpec], holder: StepHolder,
        softcap: float | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.model = base
        self.lm_head = head
        self._scale, self._softcap = scale, softcap
        self._set_up(base, kv_specs, holder, kwargs.get("numbering"))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V]."""
        logits = self.lm_head(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


class HandOver(nn.Module):
    """Where the base model was: gives the hidden states that the runner picked. Its children (a head may call
    ``self.model.decoder``) are itself. ``pool``: what makes the base's ``pooler_output`` of them."""

    hidden: torch.Tensor
    pool: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return self if not name.startswith("_") and name != "hidden" else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return BaseOutput(self.hidden, None if self.pool is None else self.pool(self.hidden))
