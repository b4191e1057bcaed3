"""A Llama that takes images and audio, tiny: an "encoder" of one product, placeholders 250 (image) and 251 (audio).

What each feature is can be said in one line, so tests compare with Transformers' Llama on merged embeddings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelbay import hookimpl
from modelbay.errors import UsageError
from modelbay.specs import ArchSpec
from modelbay_runtime.layers.decoder import CausalLM
from modelbay_runtime.multimodal.data import Media, MediaItem, MediaSpan
from modelbay_testing.tiny import tiny_checkpoint

IMAGE, AUDIO = 250, 251
_NUMBERS = itertools.count()
HIDDEN = 64
NAME = "TinyMediaForCausalLM"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<' + part['type'] + '>' }}{% endif %}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def projection() -> torch.Tensor:
    """[4, H]"""
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5)) * 0.5


class TinyMedia(CausalLM):
    """Attributes that tests set: ``bidirectional`` spans, ``tight`` positions (all of an item stand at one place)."""

    media_kinds: tuple[str, ...] = ("image", "audio")
    bidirectional = False
    tight = False
    projection: torch.Tensor

    def __init__(self, config: Any, build: Any) -> None:
        super().__init__(config, build)
        with torch.device("cpu"):
            self.register_buffer("projection", projection(), persistent=False)
        self.encoded: list[bytes] = []
        self.seen: list[Any] = []

    def encode_media(self, item: MediaItem) -> torch.Tensor:
        self.encoded.append(item.digest)
        return item.inputs["values"] @ self.projection

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, input_ids: Any, positions: Any, step: Any, inputs_embeds: Any = None) -> torch.Tensor:
        self.seen.append((None if input_ids is None else tuple(input_ids.shape), positions.clone(), step.spans))
        return super().forward(input_ids, positions if positions.ndim == 1 else positions[0], step, inputs_embeds)

    @classmethod
    def media_processor(cls, resolution: Any, tokenizer: Any) -> TinyProcessor:
        return TinyProcessor(cls, tokenizer)


def image_values(image: Any) -> torch.Tensor:
    """[rows of the image, 4]: red, green and blue means of a row, and one."""
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 255
    return torch.cat([pixels.mean(dim=1), torch.ones(pixels.shape[0], 1)], dim=1)


def audio_values(samples: np.ndarray) -> torch.Tensor:
    """[samples // 4, 4]"""
    return torch.from_numpy(samples[: len(samples) // 4 * 4].reshape(-1, 4))


class TinyProcessor:
    """One token for each feature row. In texts "<image>" and "<audio>" are the placeholders."""

    sampling_rate: int | None = 16_000
    chat_template: str | None = TEMPLATE

    def __init__(self, model_class: type[TinyMedia], tokenizer: Any) -> None:
        self.model_class = model_class
        self.tokenizer = tokenizer

    def __call__(
        self, prompt: Any, images: list[Any], audios: list[Any], *, add_special_tokens: bool = True
    ) -> tuple[list[int], Media]:
        ids = self._ids(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        values = {IMAGE: [image_values(i) for i in images], AUDIO: [audio_values(samples) for samples, _ in audios]}
        media, out = Media([], []), []
        for token in ids:
            if token not in values:
                out.append(token)
                continue
            if not values[token]:
                raise UsageError("the prompt has more placeholders than images or audio.")
            value = values[token].pop(0)
            digest = hashlib.sha256(value.numpy().tobytes() + bytes([token])).digest()
            media.spans.append(MediaSpan(len(media.items), len(out), len(value), None, self.model_class.bidirectional))
            media.items.append(MediaItem("image" if token == IMAGE else "audio", digest, {"values": value}))
            out += [token] * len(value)
        if any(values.values()):
            raise UsageError("the prompt has fewer placeholders than images or audio.")
        if self.model_class.tight:
            media.positions, media.delta = tight_positions(out)
        return out, media

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [self.tokenizer.bos_token_id] if add_special_tokens else []
        for place, piece in enumerate(text.replace("<audio>", "<image>\0").split("<image>")):
            if place:
                ids.append(AUDIO if piece.startswith("\0") else IMAGE)
            ids += self.tokenizer(piece.lstrip("\0"), add_special_tokens=False)["input_ids"]
        return ids


def tight_positions(ids: list[int]) -> tuple[np.ndarray, int]:
    """[3, T]: an item's tokens all at one position in the first row; in the others they go on."""
    first, position, before = [], -1, None
    for token in ids:
        position += not (token in (IMAGE, AUDIO) and token == before)
        first.append(position)
        before = token
    rows = np.stack([np.array(first), np.array(first) + (np.array(ids) == IMAGE), np.array(first)])
    return rows, position + 1 - len(ids)


def make_checkpoint(path: Path) -> Path:
    """A tiny Llama's checkpoint, for `TinyMedia`."""
    folder = tiny_checkpoint(path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [NAME]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextmanager
def plugin(**attributes: Any) -> Iterator[Any]:
    """A plugin in the process, with a class of its own."""

    @hookimpl
    def register_architectures() -> list[ArchSpec]:
        kinds = ("text", *code.Model.media_kinds)
        return [ArchSpec(name=NAME, target=f"{name}:Model", model_types=("llama",), modalities=kinds)]

    name = f"tiny_media_{next(_NUMBERS)}"
    code, module = types.ModuleType(name), types.ModuleType(f"{name}_plugin")
    code.Model = type("Model", (TinyMedia,), attributes)  # type: ignore[attr-defined]
    module.register_architectures = register_architectures  # type: ignore[attr-defined]
    sys.modules[name] = code
    try:
        yield module
    finally:
        del sys.modules[name]


class DirectModel:
    """Transformers' Llama with the same weights, given embeddings that are merged here."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM as Reference

        self.model: nn.Module = Reference.from_pretrained(str(folder), dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(
        self, ids: list[int], values: list[torch.Tensor], tight: bool = False, num_prompt: int | None = None
    ) -> torch.Tensor:
        """[T, V]. ids: expanded, the first ``num_prompt`` of them the prompt. values: of the placeholders, in order."""
        num_prompt = len(ids) if num_prompt is None else num_prompt
        tokens = torch.tensor(ids)
        embeds = self.model.get_input_embeddings()(tokens)  # type: ignore[operator]
        at = [place for place in range(num_prompt) if ids[place] in (IMAGE, AUDIO)]
        if values:
            embeds[at] = torch.cat(values) @ projection()
        positions = np.arange(len(ids))
        if tight:
            rows, delta = tight_positions(ids[:num_prompt])
            positions = np.concatenate([rows[0], positions[num_prompt:] + delta])
        given = torch.from_numpy(positions)[None]
        # With a mask, or repeated positions would be read as several sequences in one row.
        mask = torch.ones(1, len(ids), dtype=torch.long)
        return self.model(inputs_embeds=embeds[None], position_ids=given, attention_mask=mask, use_cache=False).logits[
            0
        ]

    def likeliest(
        self, ids: list[int], values: list[torch.Tensor], output: list[int], tight: bool = False
    ) -> list[int]:
        """After the prompt and each of its output tokens but the last: the token that is likeliest to follow."""
        logits = self.logits([*ids, *output[:-1]], values, tight, len(ids))
        found: list[int] = logits[len(ids) - 1 :].argmax(-1).tolist()
        return found
