"""Tiny GGUF files, written from random Transformers models with llama.cpp's own writer and table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from modelbay.source import ModelFiles

VOCAB = 128
HIDDEN = 64
LAYERS = 2
HEADS, KV_HEADS = 4, 2

_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True}
#: Hugging Face's model type of each architecture, and what its config needs beyond the common sizes.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-5}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
}


@dataclass
class TinyGguf:
    """A written file, and the model it was written from."""

    path: Path
    arch: str
    model: Any


def tiny_model(arch: str, **overrides: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, extra = MODELS[arch]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    config = CONFIG_MAPPING[model_type](**{**sizes, **extra, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def gguf_tensors(arch: str, model: Any) -> dict[str, np.ndarray]:
    """What llama.cpp's converter would write: its names, its row order for rotary heads, its norms."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, LAYERS)
    found = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, leaf = name.rpartition(".")
        array = value.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = HEADS if "q_proj" in name else KV_HEADS
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        ggml_name = names.get_name(stem)
        assert ggml_name is not None, name
        found[f"{ggml_name}.{leaf}"] = np.ascontiguousarray(array)
    return found


def write_metadata(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if arch in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch in ("starcoder2", "stablelm"):
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_vocabulary(writer: gguf.GGUFWriter, size: int = VOCAB) -> None:
    """Byte-level BPE: three control tokens, then single characters, then some merges of letters."""
    letters = [chr(code) for code in range(33, 33 + size - 3 - 12)]
    merges = ["t h", "th e", "i n", "o n", "a n", "an d", "r e", "e r", "l l", "o u", "Ġ t", "Ġt h"]
    tokens = ["<pad>", "<s>", "</s>", *letters[:-1], "Ġ", *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens[:size])
    writer.add_token_types([3] * 3 + [1] * (size - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: Q) -> None:
    if kind in (Q.F32, Q.F16):
        writer.add_tensor(name, array.astype(np.float32 if kind == Q.F32 else np.float16))
    else:
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., TinyGguf]:
    """Write a tiny file: ``write_gguf("llama", Q.Q8_0, metadata=fn(writer), tensors={name: array}, **config)``."""

    def write(
        arch: str = "llama",
        kind: Q = Q.F32,
        *,
        name: str = "tiny.gguf",
        metadata: Callable[[gguf.GGUFWriter], None] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        vocabulary: bool = True,
        **overrides: Any,
    ) -> TinyGguf:
        model = tiny_model(arch, **overrides)
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        write_metadata(writer, arch, model.config)
        if vocabulary:
            write_vocabulary(writer)
        if metadata is not None:
            metadata(writer)
        for tensor, array in {**gguf_tensors(arch, model), **(tensors or {})}.items():
            add_tensor(writer, tensor, array, kind if array.ndim > 1 else Q.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return TinyGguf(path, arch, model)

    return write


@pytest.fixture
def files_of() -> Callable[[Path], ModelFiles]:
    """What a reference to a directory, or to one file in it, resolves to."""

    def files(path: Path) -> ModelFiles:
        root = path if path.is_dir() else path.parent
        names = tuple(sorted(sibling.name for sibling in root.iterdir()))
        entry = None if path.is_dir() else path.name
        return ModelFiles(reference=str(path), kind="local", root=root, names=names, entry=entry)

    return files
