"""Classification heads: Transformers' own code, its base model replaced by one that hands over hidden states.

Some heads read more of the base than its hidden states: what it pooled of them (``pooler_output``). By which of its
modules is seen in the probe, and those are run on each sequence's hidden states by itself.
Legend: n sequences, T tokens, H hidden size, C classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError, ModelbayError, one_line
from modelbay.pooling import PoolingSpec
from modelbay.resolve import Resolution
from modelbay_runtime.pooling.classifier import read_by
from modelbay_transformers.model import HandOver, TransformersForCausalLM
from modelbay_transformers.probe_run import TOKENS, one_number

_CLASSIFIES = ("ForSequenceClassification", "RewardModel")
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "unk_token_id")
Pool = Callable[[torch.Tensor], torch.Tensor]


def classification_head(resolution: Resolution, config: Any) -> type:
    """The class with the head: the one that the checkpoint names, or after a conversion the one beside it.

    Raises:
        BackendError: Transformers has none.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    name = resolution.architecture
    found = getattr(transformers, name, None) if name.endswith(_CLASSIFIES) else None
    if found is None and type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    if not isinstance(found, type):
        raise BackendError(f"Transformers has no classification head for model_type {resolution.config.model_type!r}.")
    return found


@dataclass(frozen=True, slots=True)
class PooledBy:
    """Which modules of the base make its ``pooler_output``, one after another, and whether of the first token alone."""

    modules: tuple[str, ...]
    first_token: bool

    def of(self, base: nn.Module) -> Pool:
        """[n, T, H] -> [n, H]."""

        def pool(hidden: torch.Tensor) -> torch.Tensor:
            value = hidden[:, 0] if self.first_token else hidden
            for name in self.modules:
                value = base.get_submodule(name)(value)
            return value

        return pool


class PoolerWatch:
    """While it is entered, every forward of ``base`` is watched: ``found`` is how the last one made its
    ``pooler_output``, None if it made none, or in a way that is not understood."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.found: PooledBy | None = None
        self._calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> PoolerWatch:
        self._hooks.append(self.base.register_forward_pre_hook(lambda module, args: self._calls.clear()))
        for name, module in self.base.named_modules():
            if name:
                self._hooks.append(module.register_forward_hook(self._write(name)))
        self._hooks.append(self.base.register_forward_hook(self._end))
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._calls.clear()

    def _write(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
                self._calls.append((name, args[0], output))

        return hook

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden, pooled = getattr(output, "last_hidden_state", None), getattr(output, "pooler_output", None)
        self.found = None
        if isinstance(hidden, torch.Tensor) and isinstance(pooled, torch.Tensor):
            self.found = self._trace_back(hidden, pooled)

    def _trace_back(self, hidden: torch.Tensor, pooled: torch.Tensor) -> PooledBy | None:
        names: list[str] = []
        value = pooled
        while value is not hidden and not _is_first_token(value, hidden):
            # From the end: a module's own call is written down after those of its children.
            call = next((call for call in reversed(self._calls) if call[2] is value and call[0] not in names), None)
            if call is None or call[1] is value:
                return None
            names.insert(0, call[0])
            value = call[1]
        return PooledBy(tuple(names), value is not hidden)


def _is_first_token(value: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Whether this is ``hidden[:, 0]``, as a view."""
    shape = (hidden.shape[0], hidden.shape[-1])
    return value._base is hidden and value.shape == shape and value.storage_offset() == hidden.storage_offset()


class TransformersForSequenceClassification(TransformersForCausalLM):
    """A classifier whose logits are computed by Transformers' own class. See
    `modelbay_runtime.pooling.classifier.Classifier`."""

    def set_up_head(self, pooled: PooledBy | None, hidden_size: int, spec: PoolingSpec) -> None:
        """Args:
        hidden_size: of the hidden states that the base gives.
        """
        self._pooled, self._hidden_size, self._spec = pooled, hidden_size, spec
        self._hand_over.pool = None if pooled is None else pooled.of(self.base)

    @cached_property
    def reads(self) -> str:
        """Which token the head reads, by trial; asked when the parameters are loaded."""
        head = self._head[0]
        like = next(parameter for name, parameter in head.named_parameters() if parameter.is_floating_point())
        with torch.inference_mode():
            return read_by(self._logits, like.new_empty(self._hidden_size), self._spec.pad_token_id, _ids(head.config))

    @torch.inference_mode()
    def classify(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """[n, T, H] and [n, T] -> [n, C]."""
        if self._spec.pad_token_id is not None or hidden.shape[0] == 1:
            return self._logits(hidden, input_ids)
        # Without a token for padding, classes that look for the last token take one sequence at a time.
        return torch.cat([self._logits(h[None], i[None]) for h, i in zip(hidden, input_ids, strict=True)])

    def _logits(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        self._hand_over.hidden = hidden
        return call_head(self._head[0], input_ids)


def call_head(head: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """The logits of a class whose base hands over hidden states."""
    accepted = inspect.signature(head.forward).parameters
    given = {"return_dict": True} if "return_dict" in accepted or "kwargs" in accepted else {}
    given |= {"use_cache": False} if "use_cache" in accepted else {}
    logits: torch.Tensor = head(input_ids=input_ids, **given).logits
    return logits


def check_head(outer: nn.Module, prefix: str, pooled: PooledBy | None, hidden_size: int, labels: int) -> None:
    """Run the head once, with made-up numbers for parameters.

    Raises:
        BackendError: it does not work on hidden states alone, or gives another number of logits.
    """
    base = outer.get_submodule(prefix)
    hand_over = HandOver()
    hand_over.pool = None if pooled is None else pooled.of(base)
    dtype = next(parameter.dtype for parameter in outer.parameters() if parameter.is_floating_point())
    hand_over.hidden = torch.randn(1, TOKENS, hidden_size).to(dtype)
    name = type(outer).__name__
    try:
        with one_number(outer), torch.no_grad():
            outer._modules[prefix] = hand_over
            logits = call_head(outer, torch.arange(3, 3 + TOKENS)[None])
    except ModelbayError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)[:200]}"
        raise BackendError(f"the head of {name} does not work on hidden states alone: {text}") from error
    finally:
        outer._modules[prefix] = base
    if tuple(logits.shape) != (1, labels):
        raise BackendError(f"{name} gives logits of shape {tuple(logits.shape)} for one text, and has {labels} labels.")


def _ids(config: Any) -> list[int]:
    """An ordinary token id, then those that mean something."""
    text = config.get_text_config()
    found = [getattr(text, name, None) for name in _SPECIAL]
    special = [token for ids in found for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int)]
    special = [token for token in dict.fromkeys(special) if 0 <= token < text.vocab_size]
    plain = next(token for token in range(text.vocab_size) if token not in special)
    return [plain, *special]
