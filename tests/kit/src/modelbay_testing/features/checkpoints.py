"""The tiny checkpoints of the feature table, and the same in 8 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from modelbay_testing.tiny import tiny_checkpoint, tiny_tokenizer

#: Sizes of a block. Neither divides the tiny weights, so that blocks at the ends are smaller.
ROWS, COLUMNS = 48, 40
_SCALES = "_scale_inv"


def llama(folder: Path) -> Path:
    return tiny_checkpoint(folder, "llama", num_hidden_layers=4)


def qwen3_moe(folder: Path) -> Path:
    return tiny_checkpoint(folder, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def deepseek(folder: Path, **values: Any) -> Path:
    sizes = {
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    return tiny_checkpoint(folder, "deepseek_v3", **{**sizes, **values})


def deepseek_with_draft_layer(folder: Path) -> tuple[Path, Path]:
    """A DeepSeek-V3 of two layers and a module for multi-token prediction, and another without the latter."""
    from safetensors.torch import load_file, save_file

    plain, served = deepseek(folder.with_name(f"{folder.name}-plain"), num_hidden_layers=2), folder
    three = load_file(deepseek(folder.with_name(f"{folder.name}-three"), num_hidden_layers=3) / "model.safetensors")
    shutil.copytree(plain, served)
    tensors = load_file(plain / "model.safetensors")
    prefix, hidden = "model.layers.2.", tensors["model.norm.weight"].numel()
    tensors |= {name: tensor for name, tensor in three.items() if name.startswith(prefix)}
    draw = torch.Generator().manual_seed(4)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.3
    tensors |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
    edit_config(served, num_nextn_predict_layers=1)
    return served, plain


def bert(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    from modelbay_testing.matrix.reference import randomize

    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0,
    }  # fmt: skip
    model = BertModel(BertConfig(**sizes))
    randomize(model)
    model.save_pretrained(folder)
    return tiny_tokenizer(folder, chat_template=None)


def llava(folder: Path, **overrides: Any) -> tuple[Path, Any, Any]:
    """Folder, Transformers' model, Transformers' processor."""
    from modelbay_testing.media_processors import media_checkpoint

    return media_checkpoint(folder, "llava", **overrides)


def llava_moe(folder: Path) -> tuple[Path, Any, Any]:
    """A LLaVA around a language model with experts."""
    from modelbay_testing.tiny_configs import tiny_config

    return llava(folder, text_config=tiny_config("qwen3_moe"))


def fp8_and_plain(folder: Path) -> tuple[Path, Path]:
    """The checkpoint with the matrices of its layers in blocks of e4m3 with a scale each, as DeepSeek publishes them,
    and another of the values that those stand for."""
    from safetensors.torch import load_file, save_file

    quantised, plain = folder.with_name(f"{folder.name}-quantised"), folder.with_name(f"{folder.name}-plain")
    for copy in (quantised, plain):
        shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith((".dense.weight", "_proj.weight")) and tensors[name].ndim == 2]
    assert names, "there is nothing to quantise"
    small, full = dict(tensors), dict(tensors)
    for name in names:
        values, scales, full[name] = _quantise(tensors[name])
        small |= {name: values, f"{name}{_SCALES}": scales}
    save_file(small, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(full, plain / "model.safetensors", metadata={"format": "pt"})
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [ROWS, COLUMNS]}
    edit_config(quantised, quantization_config=blocks)
    return quantised, plain


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[M, N] -> its values in e4m3 [M, N], scales [M / ROWS, N / COLUMNS], and what both stand for [M, N]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % COLUMNS, 0, -rows % ROWS))
    largest = padded.unflatten(1, (-1, COLUMNS)).unflatten(0, (-1, ROWS)).amax((1, 3))
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    full = scales.repeat_interleave(ROWS, 0)[:rows].repeat_interleave(COLUMNS, 1)[:, :columns]
    values = (weight / full).to(torch.float8_e4m3fn)
    return values, scales, values.float() * full


def edit_config(folder: Path, **values: Any) -> None:
    """Change entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def gguf_header(path: Path, architecture: str) -> Path:
    """A GGUF file of this ``general.architecture``, and nothing else in it."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
