"""The rules that a custom model keeps, checked on the built instance before it is probed and before weights are read.

What the probe of the Transformers backend sees (one attention call per module, `layer_idx`, masks) is checked there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError, one_line_with_type
from modelbay_transformers.classes import ModelClasses

#: What `experts.forward` takes, by these names: tokens [T, H], and for each token its k experts and their weights.
EXPERTS_TAKE = ("hidden_states", "top_k_index", "top_k_weights")


def check_instance(classes: ModelClasses, outer: nn.Module, base: nn.Module) -> None:
    """Check the model whose parameters are on meta; ``outer`` is ``base`` itself where there is no class around it.

    Raises:
        BackendError: the rule, and the class or module that breaks it.
    """
    if outer is not base:
        _check_same_base(classes, outer, base)
        _check_head(outer, base)
    _check_is_base(base)
    _check_name_of_experts(base)
    for name, experts in _experts(base):
        _check_experts(name, experts)


def _check_is_base(base: Any) -> None:
    if base.get_output_embeddings() is not None:
        raise BackendError(
            f"auto_map.AutoModel names {type(base).__name__}, which has a head over the vocabulary; it must name "
            "the base model (MyModel, not MyModelForCausalLM), which carries what is special about the model."
        )


def _check_same_base(classes: ModelClasses, outer: nn.Module, base: nn.Module) -> None:
    if type(base) is not classes.base:
        raise BackendError(
            f"{type(outer).__name__} holds a {type(base).__name__}, but auto_map.AutoModel names "
            f"{classes.base.__name__}: the class around the base model must hold that very class, which carries what "
            "is special about the model."
        )


def _check_head(outer: nn.Module, base: nn.Module) -> None:
    """The outer class may only turn hidden states into logits: what it did before its base model would be lost."""
    name = next(name for name, child in outer.named_children() if child is base)
    stand_in = _StandIn(base)
    outer._modules[name] = stand_in
    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            outer(input_ids=ids, use_cache=False)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(
            f"{type(outer).__name__}.forward(input_ids=…, use_cache=False) raised {one_line_with_type(error)}"
        ) from error
    finally:
        outer._modules[name] = base
    if len(stand_in.calls) == 1 and stand_in.calls[0].get("input_ids") is ids and stand_in.changed() == []:
        return
    changed = ", ".join(stand_in.changed()) or "another input_ids"
    raise BackendError(
        f"{type(outer).__name__} calls its base model {len(stand_in.calls)} times, with {changed}: what is special "
        f"about a custom model belongs into the base model ({type(base).__name__}); the class around it only "
        "computes logits."
    )


class _StandIn(nn.Module):
    """Where the base model was: writes down what it is called with."""

    #: What does not change what a base model computes.
    _NEUTRAL = ("input_ids", "use_cache", "return_dict", "output_attentions", "output_hidden_states", "logits_to_keep")

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._signature = inspect.signature(base.forward)
        # In a tuple, so that it is no child.
        self._base = (base,)
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        bound = self._signature.bind(*args, **kwargs).arguments
        bound |= bound.pop("kwargs", {})
        self.calls.append(bound)
        base: Any = self._base[0]
        width = base.config.get_text_config().hidden_size
        return MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 3, width, device="meta", dtype=base.dtype))

    def changed(self) -> list[str]:
        """The arguments that would change what the base model computes."""
        return sorted({k for call in self.calls for k, v in call.items() if v is not None and k not in self._NEUTRAL})


def _check_name_of_experts(base: nn.Module) -> None:
    for name, module in base.named_modules():
        if _takes_experts_arguments(module) and name.rpartition(".")[2] != "experts":
            raise BackendError(
                f"{name} ({type(module).__name__}) takes {', '.join(EXPERTS_TAKE)}, as experts do: a sparse MoE block "
                "must have them in an attribute `experts`."
            )


def _takes_experts_arguments(module: nn.Module) -> bool:
    return set(EXPERTS_TAKE) <= set(inspect.signature(type(module).forward).parameters)


def _experts(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in base.named_modules():
        experts = module._modules.get("experts")
        if experts is not None:
            yield f"{name}.experts" if name else "experts", experts


def _check_experts(name: str, experts: nn.Module) -> None:
    kind = type(experts).__name__
    if not isinstance(experts, nn.ModuleList):
        wrong = [f"{n} {list(p.shape)}" for n, p in experts.named_parameters() if not _is_packed(n, p)]
        if wrong or not list(experts.parameters()):
            raise BackendError(
                f"{name} ({kind}) is no nn.ModuleList, so it must hold 3-D parameters alone, one slice per expert; "
                f"it has {', '.join(wrong[:4]) or 'none'}."
            )
    if not _takes_experts_arguments(experts):
        taken = ", ".join(list(inspect.signature(type(experts).forward).parameters)[1:]) or "nothing"
        raise BackendError(f"{name} ({kind}): its forward must take {', '.join(EXPERTS_TAKE)}; it takes {taken}.")


def _is_packed(name: str, parameter: nn.Parameter) -> bool:
    """One slice per expert; a bias has one dimension less than its weight."""
    return parameter.ndim == (2 if name.endswith("bias") else 3) and "." not in name
