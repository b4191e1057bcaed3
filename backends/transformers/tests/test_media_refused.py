"""X10: what is refused of images and audio, and by which words; text alone on models that read more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from modelbay import LLM, SamplingParams, resolve
from modelbay.errors import EngineError, ModelbayError, TrustError, UsageError
from modelbay.tokenizer import load_tokenizer
from modelbay_runtime.build import build_model
from modelbay_testing.logits import engine_logits, worst_difference
from modelbay_testing.media_processors import media_checkpoint
from modelbay_transformers.processor import make_processor
from modelbay_transformers.processor_class import load_processor


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return media_checkpoint(tmp_path_factory.mktemp("llava"), "llava")[0]


def processor_of(folder: Path, **kwargs: Any) -> Any:
    found = resolve(str(folder), dtype="float32", model_impl="transformers", max_model_len=256, **kwargs)
    tokenizer = load_tokenizer(found.files, found.config, found.plugins, found.args, found.trace)
    return make_processor(found, tokenizer)


def test_x10_ids_with_placeholders_expand_like_text(llava: Path) -> None:
    """One placeholder for each image, or expanded already; anything else is refused."""
    processor = processor_of(llava)
    text, media = processor("A model <image> is loaded", [picture()], [])
    at = media.spans[0].start
    short = [*text[:at], text[at], *text[at + media.spans[0].length :]]
    for ids in (short, text):
        found, again = processor(ids, [picture()], [])
        assert found == text
        assert again.items[0].digest == media.items[0].digest
    with pytest.raises(UsageError, match="placeholders"):
        processor([5, 6, 7], [picture()], [])
    with pytest.raises(UsageError, match="placeholders"):
        processor([*short, text[at]], [picture()], [])


def test_x10_equal_images_are_equal_items_and_others_are_not(llava: Path) -> None:
    processor = processor_of(llava)
    other = Image.new("RGB", (60, 90), (200, 10, 30))
    _, media = processor("<image> <image> <image>", [picture(), other, picture()], [])
    first, second, third = (item.digest for item in media.items)
    assert first == third != second


def test_x10_audio_for_a_model_of_images_is_refused(llava: Path) -> None:
    with LLM(str(llava), dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 22) as llm:
        sound = (np.zeros(1600, np.float32), 16_000)
        with pytest.raises(UsageError, match="takes text, image only"):
            llm.generate([{"prompt": "<image>", "multi_modal_data": {"audio": sound}}], SamplingParams(max_tokens=1))


def test_a1_auto_resolves_a_model_of_images_and_says_what_it_reads(llava: Path) -> None:
    found = resolve(str(llava), dtype="float32")
    assert (found.backend, found.task, found.config.num_layers) == ("transformers", "generate", 2)
    module = build_model(found).module
    assert type(module).__name__.startswith("Transformers")
    assert module.media_kinds == ("image",)
    assert any(decision.question == "reads" and "image" in decision.answer for decision in found.trace.decisions)


def test_x10_a_processor_in_the_repository_needs_trust(llava: Path, tmp_path: Path) -> None:
    """Transformers' own class is taken without it; a class that only the repository has is not run."""
    for path in llava.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    said = {"processor_class": "TheirProcessor", "auto_map": {"AutoProcessor": "processing_theirs.TheirProcessor"}}
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    for name in ("tokenizer_config.json", "preprocessor_config.json"):
        if (tmp_path / name).exists():
            rest = json.loads((tmp_path / name).read_text())
            rest.pop("processor_class", None)
            (tmp_path / name).write_text(json.dumps(rest))
    marker = tmp_path / "ran"
    (tmp_path / "processing_theirs.py").write_text(f"open({str(marker)!r}, 'w')\n")
    processor_of(tmp_path)  # LlavaProcessor is Transformers' own for this type
    assert not marker.exists()
    resolution = resolve(str(tmp_path), dtype="float32", max_model_len=256)
    object.__setattr__(resolution.config, "model_type", "theirs")
    with pytest.raises(TrustError, match="TheirProcessor"):
        load_processor(resolution, None)
    assert not marker.exists()


def test_x10_a_model_without_a_processor_says_so(llava: Path, tmp_path: Path) -> None:
    for path in llava.iterdir():
        if "processor" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ModelbayError, match="cannot be loaded"):
        processor_of(tmp_path)


def test_x10_media_that_were_never_compared_are_refused_and_text_is_served(tmp_path: Path) -> None:
    """mllama attends to its images apart from its tokens."""
    from modelbay_testing.matrix.cases import IMAGE_TEXT, Case
    from modelbay_testing.matrix.media_configs import media_config

    config = media_config(Case(IMAGE_TEXT, "mllama", "MllamaForConditionalGeneration"))
    config.save_pretrained(tmp_path)
    module = build_model(resolve(str(tmp_path), dtype="float32", max_model_len=64)).module
    assert module.media_kinds == ()
    assert "cross_attention_states" in module.media_refusal


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen2_vl"])
def test_x10_text_alone_equals_transformers(model_type: str, tmp_path: Path) -> None:
    folder, model, _ = media_checkpoint(tmp_path, model_type)
    prompts = [[5, 9, 80, 33], list(range(20, 60)), [7]]
    with LLM(str(folder), dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 24) as llm:
        runs = engine_logits(llm, prompts, 8)
    with torch.inference_mode():
        expected = [model(torch.tensor([ids[:-1]]), use_cache=False).logits[0] for ids, _ in runs]
    assert worst_difference([rows for _, rows in runs], expected) < 1e-4


def test_c8_backbone_keeps_the_tower_in_its_dtype(tmp_path: Path) -> None:
    """The tower in float32 beside a language model in bfloat16: its features are those of float32, cast."""
    folder, model, processor = media_checkpoint(tmp_path, "llava")
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    config["vision_config"]["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    inputs = processor(text=["<image>"], images=[picture()], return_tensors="pt")
    with LLM(str(folder), dtype="backbone", max_model_len=64, kv_cache_memory_bytes=1 << 22) as llm:
        module = llm.apply_model(lambda module: module)[0]
        tower, text = module.model.vision_tower, module.base
        assert {p.dtype for p in tower.parameters()} == {torch.float32}
        assert {p.dtype for p in text.parameters()} == {torch.bfloat16}
        item = processor_of(folder)("<image>", [picture()], [])[1].items[0]
        found = module.encode_media(item)
    assert found.dtype == torch.bfloat16
    with torch.inference_mode():
        states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
        wanted = model.model.multi_modal_projector.bfloat16()(states.bfloat16())[0]
    assert torch.allclose(found.float(), wanted.float(), atol=0.02)


def test_x10_what_a_language_model_is_given_and_is_not_known_is_refused(llava: Path, monkeypatch: Any) -> None:
    module = build_model(resolve(str(llava), dtype="float32", max_model_len=64)).module
    arrived = {"inputs_embeds": torch.zeros(1, 2, 64), "cross_attention_states": torch.zeros(1)}
    monkeypatch.setattr(module._gate, "take", lambda outer, **inputs: arrived)
    with pytest.raises(EngineError, match="cross_attention_states"):
        module.embed(torch.tensor([5, 6]))
