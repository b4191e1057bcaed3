"""GGUF's tensor names and row order to Hugging Face's, as transforms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from modelbay.weights.transforms import Ignore, Rename, Reshape, Transform
from modelbay_gguf.archs import GgufArch, arch_of_model_type

if TYPE_CHECKING:
    from modelbay.config import ModelConfig

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LEAF = r"\.(weight|bias)$"


def transforms(config: ModelConfig) -> tuple[Transform, ...]:
    """What turns the tensors of a GGUF file into those of the Hugging Face checkpoint.

    Raises:
        ConfigError: the model type is not one whose GGUF names are known.
    """
    arch = arch_of_model_type(config.model_type)
    return (*_renames(arch), *_rows(arch), *_rope_factors(config))


def _renames(arch: GgufArch) -> list[Transform]:
    outer = [Rename(f"^{name}{_LEAF}", rf"{target}.\1") for name, target in _OUTER.items()]
    layer = [
        Rename(rf"^blk\.(\d+)\.{re.escape(name)}{_LEAF}", rf"model.layers.\1.{target}.\2")
        for name, target in arch.layer.items()
    ]
    return [*outer, *layer]


def _rows(arch: GgufArch) -> list[Transform]:
    """ggml turns neighbouring rows of a head, Hugging Face the two halves: [pairs, 2] rows become [2, pairs]."""
    if not arch.permuted:
        return []
    rules: list[Transform] = []
    for projection, heads in (("q_proj", "num_heads"), ("k_proj", "num_kv_heads")):
        name = rf"\.self_attn\.{projection}"
        rules.append(Reshape(rf"{name}\.weight$", shape=(heads, -1, 2, "hidden_size"), order=(0, 2, 1, 3)))
        rules.append(Reshape(rf"{name}\.bias$", shape=(heads, -1, 2), order=(0, 2, 1)))
    return rules


def _rope_factors(config: ModelConfig) -> list[Transform]:
    """Factors per frequency are no parameters. They may be passed over only where the config carries them (see
    `modelbay_gguf.rope`); otherwise the tensor stays unknown, and the loader refuses it."""
    types = {spec.type for spec in config.rope.values()}
    rules: list[Transform] = []
    if "llama3" in types:
        rules.append(Ignore(r"^rope_freqs\.weight$", rule="gguf: llama3 rope factors, read into rope_parameters"))
    if "longrope" in types:
        rules.append(
            Ignore(r"^rope_factors_(long|short)\.weight$", rule="gguf: longrope factors, read into the config")
        )
    return rules
