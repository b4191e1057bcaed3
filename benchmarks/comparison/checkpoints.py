"""A checkpoint of a real model's shape with random weights, for when only speed is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN2_HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def qwen2_config(**overrides: Any) -> Any:
    """Transformers' config of the 0.5B model, with other values where they are given."""
    from transformers import Qwen2Config

    values = {**QWEN2_HALF_BILLION, **overrides}
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    return Qwen2Config(**values, rope_parameters=rope, dtype="bfloat16")


def make_qwen2(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random bfloat16 Qwen2ForCausalLM of the 0.5B model's shape, with a small tokenizer.

    Args:
        folder: must not exist yet, or be empty.
        overrides: config values other than those of the 0.5B model.

    Raises:
        FileExistsError: there is something in ``folder``.
    """
    import torch
    from transformers import Qwen2ForCausalLM

    from modelbay_testing.tiny import tiny_tokenizer

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    config = qwen2_config(**overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer(folder, add_bos=False, model_max_length=config.max_position_embeddings)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}) + "\n")
    return folder
