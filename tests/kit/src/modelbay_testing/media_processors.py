"""Tiny checkpoints that read images or audio, with the processor that their family has.

Legend: ids of the tiny tokenizer below `FIRST` are text, the others special.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modelbay_testing.tiny import tiny_tokenizer

FIRST = 200
VOCAB_SIZE = 256


def special_tokenizer(folder: Path, tokens: Sequence[str], names: dict[str, str] | None = None) -> Any:
    """A tiny tokenizer with special tokens from id `FIRST` on. ``names``: attribute -> token."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    config: dict[str, Any] = {"extra_special_tokens": names} if names else {}
    tiny_tokenizer(folder, vocab_size=FIRST, chat_template=None, **config)
    path = str(folder / "tokenizer.json")
    raw = Tokenizer.from_file(path)
    # The tokens up to FIRST that training did not need.
    raw.add_tokens([f"<unused{i}>" for i in range(FIRST - raw.get_vocab_size())])
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    raw.save(path)
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def _llava(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = special_tokenizer(folder, ["<image>"])
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return processor, {"image_token_id": FIRST, "vision_config": {"image_size": 28, "patch_size": 14}}


def _llava_next(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    grid = [[28, 56], [56, 28]]
    tokenizer = special_tokenizer(folder, ["<image>"])
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=grid
    )
    processor = LlavaNextProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    vision = {"image_size": 28, "patch_size": 14}
    return processor, {"image_token_id": FIRST, "vision_config": vision, "image_grid_pinpoints": grid}


def _qwen2_vl(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

    names = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer = special_tokenizer(folder, names)
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=112 * 112)
    processor = _without_videos(Qwen2VLProcessor, images, tokenizer)
    ids = {"image_token_id": FIRST, "vision_start_token_id": FIRST + 1, "vision_end_token_id": FIRST + 2}
    return processor, {**ids, "video_token_id": FIRST + 3}


def _gemma3(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = special_tokenizer(folder, list(names.values()), names)
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    ids = {"image_token_id": FIRST, "boi_token_id": FIRST + 1, "eoi_token_id": FIRST + 2}
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4)
    return processor, {**ids, "mm_tokens_per_image": 4, "vision_config": {"image_size": 56, "patch_size": 14}}


def _idefics3(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    places = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    names = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *places]
    tokenizer = special_tokenizer(folder, names)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4)
    vision = {"image_size": 56, "patch_size": 14}
    return processor, {"image_token_id": FIRST, "scale_factor": 2, "vision_config": vision}


def _internvl(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import GotOcr2ImageProcessorPil, InternVLProcessor

    names = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
        "video_token": "<video>",
    }  # fmt: skip
    tokenizer = special_tokenizer(folder, list(names.values()), names)
    images = GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=2
    )
    processor = _without_videos(InternVLProcessor, images, tokenizer, image_seq_length=4)
    return processor, {"image_token_id": FIRST, "vision_config": {"image_size": [28, 28], "patch_size": [7, 7]}}


def _qwen2_audio(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = special_tokenizer(folder, ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    listens = WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    audio = {"num_mel_bins": 80, "max_source_positions": 50}
    return Qwen2AudioProcessor(listens, tokenizer), {"audio_token_id": FIRST, "audio_config": audio}


def _without_videos(cls: Any, images: Any, tokenizer: Any, **kwargs: Any) -> Any:
    """Families that also read videos want a processor for them, which needs torchvision."""
    from modelbay_transformers.processor_class import NoVideos, with_parts

    return with_parts(cls, tokenizer)(images, tokenizer, NoVideos(), **kwargs)


#: Model type -> what stands for an item in a prompt, and how the processor is made.
FAMILIES: dict[str, tuple[str, Callable[[Path], tuple[Any, dict[str, Any]]]]] = {
    "llava": ("<image>", _llava),
    "llava_next": ("<image>", _llava_next),
    "qwen2_vl": ("<|vision_start|><|image_pad|><|vision_end|>", _qwen2_vl),
    "gemma3": ("<start_of_image>", _gemma3),
    "idefics3": ("<image>", _idefics3),
    "internvl": ("<IMG_CONTEXT>", _internvl),
    "qwen2_audio": ("<|audio_bos|><|AUDIO|><|audio_eos|>", _qwen2_audio),
}


def media_checkpoint(folder: Path, model_type: str, **more: Any) -> tuple[Path, Any, Any]:
    """A tiny random checkpoint with its processor: (folder, Transformers' model, Transformers' processor).

    ``more``: config values beside the family's.
    """
    from modelbay_testing.matrix.cases import media_models
    from modelbay_testing.matrix.media_configs import media_config, media_reference

    folder.mkdir(parents=True, exist_ok=True)
    processor, overrides = FAMILIES[model_type][1](folder)
    [case] = [case for case in media_models() if case.model_type == model_type]
    config = media_config(case, {**overrides, **more})
    model = media_reference(config, case.architecture)
    model.save_pretrained(folder)
    config.save_pretrained(folder)
    _save(processor, folder)
    _as_published(folder)
    return folder, model, processor


def _save(processor: Any, folder: Path) -> None:
    if not hasattr(processor, "video_processor"):
        processor.save_pretrained(folder)
        return
    processor.image_processor.save_pretrained(folder)
    said = {"processor_class": type(processor).__name__}
    if hasattr(processor, "image_seq_length"):
        said["image_seq_length"] = processor.image_seq_length
    (folder / "processor_config.json").write_text(json.dumps(said), encoding="utf-8")


def _as_published(folder: Path) -> None:
    """Checkpoints name the processors of their images without "Pil": which one is used depends on what is installed."""
    for path in folder.glob("*processor*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace("ProcessorPil", "Processor"), encoding="utf-8")
        json.loads(path.read_text(encoding="utf-8"))
