"""The tiny checkpoints: the same every time, really random, and what Transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelbay_testing.logits import worst_difference
from modelbay_testing.tiny import tiny_checkpoint, tiny_tokenizer


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral"])
def test_checkpoint_loads_and_its_logits_vary(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_checkpoint(tmp_path / "m", model_type)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0]
    assert ids.max() < model.config.vocab_size == 256
    assert logits.std() > 0.5
    assert len(set(logits.argmax(-1).tolist())) > 1
    assert all(parameter.std() > 0.01 for parameter in model.parameters())
    assert model.config.architectures == [type(model).__name__]


def test_the_same_arguments_give_the_same_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first, second = (load_file(tiny_checkpoint(tmp_path / name) / "model.safetensors") for name in "ab")
    other = load_file(tiny_checkpoint(tmp_path / "c", seed=1) / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(bool((first[name] == second[name]).all()) for name in first)
    assert not bool((first["lm_head.weight"] == other["lm_head.weight"]).all())


def test_overrides_shards_and_dtype(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = tiny_checkpoint(tmp_path / "m", num_hidden_layers=3, dtype="bfloat16", max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    names = {name for shard in shards for name in load_file(shard)}
    assert len(shards) > 1
    assert (folder / "model.safetensors.index.json").is_file()
    assert any(name.startswith("model.layers.2.") for name in names)
    assert load_file(shards[0]).popitem()[1].dtype == torch.bfloat16


def test_tokenizer_with_every_byte_round_trips(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, vocab_size=400))
    text = "é 日本 👩‍👩‍👧\n\t"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_what_is_no_number_is_no_match() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    spoilt = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
    absent = torch.tensor([[float("nan")] * 2, [3.0, 4.0]])
    assert worst_difference([rows], [rows]) == 0
    assert worst_difference([absent], [rows]) == 0
    assert worst_difference([spoilt], [rows]) == worst_difference([rows], [spoilt]) == float("inf")
