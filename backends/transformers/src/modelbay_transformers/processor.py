"""The model's own processor, from its own files, with our tokenizer: prompts with images and audio to ids and items.

Transformers' processor expands the placeholders of a whole prompt. Each item is prepared once more by itself where
there are several, so that its inputs are its own: equal images give equal items, whatever stands beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from modelbay.errors import UsageError
from modelbay.resolve import Resolution
from modelbay_runtime.multimodal.data import Media
from modelbay_transformers.media import Piece, lay_out, placeholder_id, takes_argument

#: What a processor returns of the text.
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels", "text_replacement_offsets"}
_ARGUMENT = {"image": "images", "audio": "audio"}


class TransformersProcessor:
    """See `modelbay_runtime.multimodal.data.MediaProcessor`.

    Args:
        processor: Transformers' own. model: an instance of Transformers' class, parameters on meta.
    """

    def __init__(self, processor: Any, model: Any, name: str) -> None:
        self._processor, self._model, self._name = processor, model, name
        listens = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
        self.sampling_rate: int | None = getattr(listens, "sampling_rate", None)
        self.chat_template: str | None = getattr(processor, "chat_template", None)

    def __call__(
        self,
        prompt: str | list[int],
        images: list[Any],
        audios: list[tuple[np.ndarray, int]],
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], Media]:
        items: dict[str, list[Any]] = {"image": images, "audio": [samples for samples, _ in audios]}
        items = {kind: listed for kind, listed in items.items() if listed}
        if isinstance(prompt, str):
            ids, alone = self._from_text(prompt, items, add_special_tokens)
        else:
            ids, alone = self._from_ids(list(prompt), items)
        pieces = self._pieces(ids, alone)
        return ids, lay_out(self._model, ids, pieces)

    def _from_text(
        self, prompt: str, items: Mapping[str, Sequence[Any]], add_special_tokens: bool
    ) -> tuple[list[int], dict[str, list[_Prepared]]]:
        for kind in _ARGUMENT:
            token = self._token(kind)
            if token is not None:
                self._check_count(kind, token, prompt.count(token), len(items.get(kind, ())))
        whole = self._prepare(prompt, items, add_special_tokens)
        if sum(map(len, items.values())) == 1:
            (kind,) = items
            return whole.ids, {kind: [whole]}
        return whole.ids, {kind: self._each(kind, listed, whole, len(items)) for kind, listed in items.items()}

    def _each(self, kind: str, listed: Sequence[Any], whole: _Prepared, kinds: int) -> list[_Prepared]:
        """Every item by itself; cut from the whole where the model treats several together in another way."""
        alone = [self._prepare(self._named_token(kind), {kind: [item]}, False) for item in listed]
        wanted = whole.count(self._placeholder(kind))
        if sum(one.count(self._placeholder(kind)) for one in alone) == wanted:
            return alone
        rows = {len(value) for value in whole.inputs.values()}
        if kinds > 1 or rows != {len(listed)} or wanted % len(listed):
            raise UsageError(
                f"{self._name} prepares several items of kind {kind} in one prompt in a way not known here."
            )
        ids = [self._placeholder(kind)] * (wanted // len(listed))
        return [
            _Prepared(ids, {name: value[i : i + 1] for name, value in whole.inputs.items()}) for i in range(len(listed))
        ]

    def _from_ids(
        self, ids: list[int], items: Mapping[str, Sequence[Any]]
    ) -> tuple[list[int], dict[str, list[_Prepared]]]:
        """Placeholders are one for each item, or expanded already."""
        found: dict[str, list[_Prepared]] = {}
        for kind, listed in items.items():
            token = self._named_token(kind)
            written = self._processor.tokenizer.convert_tokens_to_ids(token)
            alone = [self._prepare(token, {kind: [item]}, False) for item in listed]
            count, feature_id = ids.count(written), self._placeholder(kind)
            expanded = sum(one.count(feature_id) for one in alone)
            if not (written == feature_id and count == expanded and count != len(listed)):
                self._check_count(kind, token, count, len(listed))
                rest = iter(alone)
                ids = [new for old in ids for new in (next(rest).ids if old == written else (old,))]
            found[kind] = alone
        return ids, found

    def _pieces(self, ids: Sequence[int], alone: Mapping[str, Sequence[_Prepared]]) -> list[Piece]:
        """Where each item lies: placeholders belong to the items in order, as many as each takes.

        Raises:
            UsageError: there are more or fewer of them (the prompt's text may hold some).
        """
        pieces: list[Piece] = []
        for kind, prepared in alone.items():
            feature_id = self._placeholder(kind)
            places = [i for i, token in enumerate(ids) if token == feature_id]
            counts = [one.count(feature_id) for one in prepared]
            if sum(counts) != len(places) or 0 in counts:
                raise UsageError(
                    f"the prompt has {len(places)} tokens for features of kind {kind}; the items give {sum(counts)}."
                )
            begin = 0
            for one, count in zip(prepared, counts, strict=True):
                first, last = places[begin], places[begin + count - 1]
                pieces.append((kind, one.inputs, first, list(ids[first : last + 1])))
                begin += count
        return sorted(pieces, key=lambda piece: piece[2])

    def _prepare(self, text: str, items: Mapping[str, Sequence[Any]], add_special_tokens: bool) -> _Prepared:
        """Transformers' processor on one text and its items."""
        given: dict[str, Any] = {_ARGUMENT[kind]: list(listed) for kind, listed in items.items()}
        if "audio" in items:
            given["audio_kwargs"] = {"sampling_rate": self.sampling_rate}
        output = self._processor(
            text=[text], return_tensors="pt", text_kwargs={"add_special_tokens": add_special_tokens}, **given
        )
        inputs = {
            name: torch.as_tensor(value)
            for name, value in output.items()
            if name not in _OF_TEXT and takes_argument(self._model, name)
        }
        return _Prepared(output["input_ids"][0].tolist(), inputs)

    def _token(self, kind: str) -> str | None:
        """What a text has where an item of this kind is to stand."""
        token: str | None = getattr(self._processor, f"{kind}_token", None)
        return token

    def _named_token(self, kind: str) -> str:
        token = self._token(kind)
        if token is None:
            raise UsageError(f"the processor of {self._name} does not say what stands for items of kind {kind}.")
        return token

    def _placeholder(self, kind: str) -> int:
        found = placeholder_id(self._model.config, kind)
        if found is None:
            raise UsageError(f"the config of {self._name} does not say which token stands for {kind}.")
        return found

    def _check_count(self, kind: str, token: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise UsageError(
                f"the prompt has {found} placeholders {token!r}, and {wanted} items of kind {kind} were given.",
                hint=f"Write {token} once for each, in their order.",
            )


class _Prepared:
    """What came of a text with its items: ids, and the model's arguments."""

    __slots__ = ("ids", "inputs")

    def __init__(self, ids: list[int], inputs: dict[str, torch.Tensor]) -> None:
        self.ids, self.inputs = ids, inputs

    def count(self, token: int) -> int:
        return self.ids.count(token)


def make_processor(resolution: Resolution, tokenizer: Any) -> TransformersProcessor | None:
    """The processor of a resolved model; None for one that takes text alone.

    Raises:
        UsageError: there is no processor, or no tokenizer.
        TrustError: only code in the repository could prepare inputs, and it is not trusted.
    """
    from modelbay_transformers.classes import find_classes
    from modelbay_transformers.meta import build_on_meta
    from modelbay_transformers.processor_class import load_processor

    classes = find_classes(resolution)
    if not classes.media:
        return None
    if tokenizer is None:
        raise UsageError(f"{resolution.architecture} prepares images and audio with its tokenizer, and has none here.")
    model = build_on_meta(classes.head, classes.config, None, torch.float32)
    return TransformersProcessor(load_processor(resolution, tokenizer), model, resolution.architecture)
