"""A model that reads images or audio beside text: towers and head are Transformers', the language model is served.

What the language model gets for an image is what the model's own code gives it: that code runs with the item's inputs
and its placeholders, up to the language model, and what arrives there is the item's features. So merging, scaling and
casting are done by whoever knows them.

Legend: T tokens, L tokens of one item's span, F of them that features replace, H hidden size, E further columns,
R rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modelbay.errors import EngineError, ModelbayError, one_line
from modelbay_runtime.api import KVSpec, Step
from modelbay_runtime.multimodal.data import MediaItem
from modelbay_transformers import dispatch
from modelbay_transformers.attention import StepHolder
from modelbay_transformers.beside import Beside
from modelbay_transformers.gate import Arrived, Gate
from modelbay_transformers.item_inputs import BOTH_WAYS, IDS, OWN, PLACES
from modelbay_transformers.language import head_of, language_configs, media_kinds
from modelbay_transformers.masks import origin
from modelbay_transformers.media import PREFIX_TYPES
from modelbay_transformers.model import TransformersModel
from modelbay_transformers.positions import PaddedNumbering
from modelbay_transformers.probe_run import attention_of
from modelbay_transformers.refusals import MEDIA_REFUSED

#: Arguments of a language model that say nothing of the tokens, or that are ours to give.
_OURS = {"inputs_embeds", "input_ids", "position_ids", "attention_mask", "cache", "past_key_values", "cache_position",
         "use_cache", "return_dict", "logits_to_keep"}  # fmt: skip


class TransformersForConditionalGeneration(TransformersModel):
    """Parameters have the names that Transformers' class gives them. Inputs are [T, H + E] where the language model is
    given more for a token than its embedding (`modelbay_transformers.beside`).

    Args:
        outer: Transformers' class, in whose ``path`` the language model is.
    """

    def __init__(
        self, outer: nn.Module, path: str, kv_specs: Mapping[int, KVSpec], holder: StepHolder, *,
        numbering: PaddedNumbering | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        # The very same: what is loaded into this module is loaded into that one.
        self._modules, self._parameters, self._buffers = outer._modules, outer._parameters, outer._buffers
        self._non_persistent_buffers_set = outer._non_persistent_buffers_set
        self._set_up(outer.get_submodule(path), kv_specs, holder, numbering)
        self._outer = (outer,)
        self._gate = Gate(self.base)
        self._configs = language_configs(outer, path)
        parameters = inspect.signature(outer.forward).parameters
        self._names = set(parameters)
        # Some classes do not run without an image: there the head is reached, and text embedded, without them.
        self._needs_media = any(
            value.default is value.empty and name != "input_ids" and value.kind is value.POSITIONAL_OR_KEYWORD
            for name, value in parameters.items()
        )
        self._with_head = (head_of(outer, path) if self._needs_media else outer,)
        self._beside = Beside.of(self.base, outer.config)
        model_type: str = outer.config.model_type  # type: ignore[union-attr, assignment]
        self.media_refusal: str | None = MEDIA_REFUSED.get(model_type)
        self.media_kinds = () if self.media_refusal else media_kinds(outer)
        self.needs_media = model_type in PREFIX_TYPES
        # Some embed a placeholder that no item stands for (a model may write one) as another token.
        self._embeds_itself = not self._needs_media and not _hands_on_ids(outer, self._gate)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: Step,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids, or [T, H + E] embeddings, and [T] or [P, T] positions -> [T, H]."""
        if self.needs_media and inputs_embeds is None and step.num_decodes < step.num_seqs:
            raise EngineError(
                f"{type(self._outer[0]).__name__} reads its prompts both ways, images among them: none came."
            )
        if inputs_embeds is None and input_ids is not None and self._embeds_itself:
            inputs_embeds, input_ids = self.embed(input_ids), None
        return super().forward(input_ids, positions, step, inputs_embeds)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V]."""
        ids = hidden.new_zeros((1, hidden.shape[0]), dtype=torch.long)
        output = self._gate.give(self._with_head[0], hidden[None], input_ids=ids, use_cache=False, return_dict=True)
        logits: torch.Tensor = output.logits[0]
        return logits

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H + E]; what is given for placeholders is not of use."""
        if self._needs_media:
            return self._outer[0].get_input_embeddings()(input_ids)  # type: ignore[operator]
        return self._beside.pack(self._arriving({"input_ids": input_ids[None]}), None)

    def encode_media(self, item: MediaItem) -> torch.Tensor:
        """What stands in the item's places: [F, H + E].

        Raises:
            EngineError: the model's own code refuses the item, or gives its language model what is not served.
        """
        inputs = {name: self._moved(value, item.kind) for name, value in item.inputs.items() if name not in OWN}
        inputs["input_ids"] = item.inputs[IDS].to(self._device)[None]
        places = item.inputs[PLACES].to(self._device)
        arrived = self._arriving(inputs)
        self._check_mask(arrived.get("attention_mask"), bool(item.inputs[BOTH_WAYS]), len(places))
        return self._beside.pack(arrived, places)

    @property
    def _device(self) -> torch.device:
        return next(self.base.parameters()).device

    def _moved(self, value: torch.Tensor, kind: str) -> torch.Tensor:
        dtype = self._tower_dtype(kind) if value.is_floating_point() else value.dtype
        return value.to(self._device, dtype)

    def _tower_dtype(self, kind: str) -> torch.dtype:
        """Of the first parameter outside of the language model, in a part named for this kind if there is one."""
        own = {id(parameter) for parameter in self.base.parameters()}
        towers = [(n, p) for n, p in self.named_parameters() if id(p) not in own and p.is_floating_point()]
        words = ("audio", "speech") if kind == "audio" else ("vision", "visual", "image")
        named = [p for name, p in towers if any(word in name for word in words)]
        found = named or [p for _, p in towers] or list(self.base.parameters())
        return found[0].dtype

    def _arriving(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that arrive at the language model when the model around it is given ``inputs``."""
        ids = inputs["input_ids"]
        given = {"use_cache": False, **inputs}
        if "position_ids" in self._names:
            given["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
        outer = self._outer[0]
        try:
            with attention_of(self._configs, dispatch.PROBING):
                arrived = self._gate.take(outer, **given)
        except (ModelbayError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            name, kind = type(outer).__name__, type(error).__name__
            raise EngineError(f"{name} raised {kind} while it read an image or sound: {one_line(error)}") from error
        unknown = [
            name for name, value in arrived.items()
            if name not in _OURS and name not in self._beside.names and value is not None and value is not False
            and name not in inputs
        ]  # fmt: skip
        if unknown or arrived.get("inputs_embeds") is None:
            names = ", ".join(sorted(unknown)) or "no inputs_embeds"
            raise EngineError(f"{type(outer).__name__} gives its language model {names}, which is not served.")
        return arrived

    def _check_mask(self, mask: Any, both_ways: bool, length: int) -> None:
        """What the processor said of the item's tokens must be what the model's mask does with them."""
        for found in mask.values() if isinstance(mask, dict) else [mask]:
            function = origin(found)
            if found is None or (found.ndim == 2 and bool(found.all())):  # of padding, and there is none
                said = False
            elif function is None:
                raise EngineError(f"{type(self._outer[0]).__name__} makes a mask of its own, which is not served.")
            else:
                zero = torch.zeros((), dtype=torch.long)
                # From the first token of the item to the last.
                said = length > 1 and bool(function(zero, zero, torch.tensor(0), torch.tensor(length - 1)))
            if said != (both_ways and length > 1):
                seen = "see each other both ways" if said else "see what comes before them alone"
                raise EngineError(f"the tokens of an image {seen} in {type(self._outer[0]).__name__}: not served here.")

    def _embedded(self, inputs_embeds: torch.Tensor) -> dict[str, Any]:
        return self._beside.unpack(inputs_embeds)


def _hands_on_ids(outer: nn.Module, gate: Gate) -> bool:
    """Whether the ids of a text reach the embedding as they are, special ones among them."""
    config: Any = outer.config
    special = {
        value
        for part in (config, config.get_text_config())
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= 0
    }
    ids = torch.tensor([[3, *sorted(special), 4]])
    embedding: Any = outer.get_input_embeddings()  # type: ignore[operator]

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise Arrived({"ids": args[0]})

    hook = embedding.register_forward_pre_hook(stop)
    try:
        arrived = gate.take(outer, input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    found = arrived.get("ids", arrived.get("input_ids"))  # or the language model embeds them
    return found is not None and torch.equal(found, ids)
