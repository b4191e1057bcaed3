"""Tokenizers: modes, the cached wrapper, chat templates (BEHAVIOUR T1-T5)."""

from modelbay.tokenizer.cached import cached
from modelbay.tokenizer.chat import encode_chat, encode_prompt, render_chat
from modelbay.tokenizer.fastokens import load_fastokens
from modelbay.tokenizer.hf import load_hf, load_slow
from modelbay.tokenizer.ids import check_token_ids, stop_token_ids
from modelbay.tokenizer.load import load_tokenizer

__all__ = [
    "cached",
    "check_token_ids",
    "encode_chat",
    "encode_prompt",
    "load_fastokens",
    "load_hf",
    "load_slow",
    "load_tokenizer",
    "render_chat",
    "stop_token_ids",
]
