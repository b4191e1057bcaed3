"""Tiny random checkpoints: what Transformers would have saved, small enough for every test to make its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 256
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_TEXT = (
    "The quick brown fox jumps over the lazy dog. A model is loaded, its layers are placed, and text comes out. "
    "Numbers 0 1 2 3 4 5 6 7 8 9 stay apart; words like the, and, of, to, in are found again and again.",
)
#: What keeps a model tiny; names a config class does not know are left out.
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


def tiny_checkpoint(
    path: str | Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    std: float = 0.3,
    dtype: str = "float32",
    max_shard_size: str | int = "1GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Save a random causal language model of this type, with tokenizer, and return ``path``.

    Hidden size 64, 2 layers, 4 heads, 2 KV heads, 256 tokens; ``overrides`` are config values. The same arguments
    give the same weights. ``std`` is large enough for logits to differ clearly from token to token.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {**_SIZES, **overrides}
    config = CONFIG_MAPPING[model_type](**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomize(model, std)
    folder = Path(path)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer(folder)
    return folder


def tiny_tokenizer(
    path: str | Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    add_bos: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    text: tuple[str, ...] = _TEXT,
    **config: Any,
) -> Path:
    """Save a byte-level BPE tokenizer (tokenizer.json and tokenizer_config.json) of at most ``vocab_size`` tokens.

    Ids 0, 1, 2 are ``<pad>``, ``<s>``, ``</s>``. Only printable ASCII and a few bytes fit in 256 tokens beside the
    merges, so other characters have no token and vanish, as in any tokenizer without byte fallback.
    With ``add_bos`` encoding starts with ``<s>``. ``config`` goes into tokenizer_config.json.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _train(vocab_size, add_bos, text).save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def _randomize(model: Any, std: float) -> None:
    """Every parameter random: norms around one, biases away from zero, so that a forgotten one is seen."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:
            torch.nn.init.normal_(parameter, std=std)


def _train(vocab_size: int, add_bos: bool, text: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 16:
        # No room for all 256 bytes and merges: keep printable ASCII, space (written Ġ) and newline (Ċ).
        alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text * 4, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
        )
    return tokenizer
