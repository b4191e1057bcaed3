"""From what a caller gives as images and audio to a prompt that the engine takes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from modelbay.errors import ModelbayError, UsageError, one_line
from modelbay.resolve import Resolution
from modelbay.specs import load_target
from modelbay.tokenizer import check_token_ids
from modelbay_runtime.multimodal.audio import read_audio, resample
from modelbay_runtime.multimodal.data import Media, MediaProcessor
from modelbay_runtime.multimodal.images import read_image
from modelbay_runtime.multimodal.sources import MediaPolicy

KINDS = ("image", "audio")
#: Of each kind in one prompt, where limit_mm_per_prompt does not say.
DEFAULT_LIMIT = 64


class MediaReader:
    """Args:
    model: its class's ``media_kinds`` say what it takes; a model without takes text only. One whose ``needs_media`` is
        true takes no text alone.

    Several threads may share one.
    """

    def __init__(self, resolution: Resolution, tokenizer: Any, model: Any) -> None:
        self.kinds: tuple[str, ...] = tuple(getattr(model, "media_kinds", ()))
        self.required = bool(getattr(model, "needs_media", False))
        self.name = resolution.architecture
        self._resolution = resolution
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._processor: MediaProcessor | None = None

    def policy(self, *, untrusted: bool = False) -> MediaPolicy:
        """What may be read. ``untrusted``: for requests that come over a network."""
        args = self._resolution.args
        return MediaPolicy.of(args.allowed_media_domains or (), args.allowed_local_media_path, untrusted=untrusted)

    @property
    def processor(self) -> MediaProcessor:
        """The model's own, made at the first call.

        Raises:
            UsageError: the model takes text only.
        """
        with self._lock:
            if self._processor is None:
                self._processor = self._make_processor()
            return self._processor

    def check(self, counts: Mapping[str, int]) -> None:
        """Refuse kinds that the model does not take, and too many items of one.

        Raises:
            UsageError: naming the kind.
        """
        limits = self._resolution.args.limit_mm_per_prompt or {}
        for kind, count in counts.items():
            if kind not in KINDS:
                raise UsageError(f"a prompt's media are image and audio, got {kind!r}.")
            if count and kind not in self.kinds:
                takes = ", ".join(("text", *self.kinds))
                raise UsageError(f"the prompt has {_articled(kind)}, and {self.name} takes {takes} only.")
            limit = limits.get(kind, DEFAULT_LIMIT)
            if count > limit:
                raise UsageError(
                    f"the prompt has {count} items of kind {kind}; at most {limit} are taken.",
                    hint="Raise limit_mm_per_prompt.",
                )

    def listed(self, data: Any) -> dict[str, list[Any]]:
        """``multi_modal_data`` as lists of items by kind, checked as by `check`; kinds without items are left out."""
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            raise UsageError(f"multi_modal_data is a mapping of image and audio, got {type(data).__name__}.")
        items = {kind: _items(kind, value) for kind, value in data.items()}
        self.check({kind: len(listed) for kind, listed in items.items()})
        return {kind: listed for kind, listed in items.items() if listed}

    def read(
        self,
        prompt: str | list[int],
        items: Mapping[str, Sequence[Any]],
        policy: MediaPolicy,
        *,
        from_template: bool = False,
    ) -> tuple[list[int], Media]:
        """Token ids with placeholders expanded, and the media.

        Args:
            items: by kind, at least one; in the order of their placeholders.
            from_template: whether a chat template wrote the text, special tokens included.

        Raises:
            UsageError: an item that cannot be read or is not allowed, or placeholders that do not fit.
        """
        self.check({kind: len(listed) for kind, listed in items.items()})
        processor = self.processor
        images = [read_image(item, policy) for item in items.get("image", ())]
        audios = [read_audio(item, policy) for item in items.get("audio", ())]
        if processor.sampling_rate is not None:
            audios = [(resample(*audio, processor.sampling_rate), processor.sampling_rate) for audio in audios]
        if isinstance(prompt, str):
            prompt = self._one_bos(prompt, from_template)
        try:
            with self._lock:
                token_ids, media = processor(prompt, images, audios, add_special_tokens=not from_template)
        except (ModelbayError, MemoryError):
            raise
        except Exception as error:  # the model's own code has its own limits, as on an image's shape
            raise UsageError(f"the model's processor refuses the images or audio: {one_line(error)}.") from error
        check_token_ids(token_ids, self._resolution.config.vocab_size)
        return token_ids, media

    def _one_bos(self, text: str, from_template: bool) -> str:
        """A tokenizer that puts a BOS before texts would double one that is written; a template may have forgotten it.
        Exactly one comes out either way."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise UsageError("a text prompt needs a tokenizer, and this model was loaded without one.")
        if not getattr(tokenizer, "adds_bos", False):
            return text
        bos: str = tokenizer.bos_token
        while text.startswith(bos):
            text = text[len(bos) :]
        return bos + text if from_template else text

    def _make_processor(self) -> MediaProcessor:
        resolution = self._resolution
        owned = resolution.plugins.require("modeling_backends", resolution.backend, "model_impl")
        make = getattr(load_target(owned.value.target)(), "media_processor", None)
        processor: MediaProcessor | None = None if make is None else make(resolution, self._tokenizer)
        if processor is None:
            raise UsageError(
                f"{self.name} takes {', '.join(self.kinds) or 'text'}, and the backend "
                f"{resolution.backend} has no processor to prepare it with."
            )
        return processor


def _items(kind: str, value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _articled(kind: str) -> str:
    return "an image" if kind == "image" else "audio"
