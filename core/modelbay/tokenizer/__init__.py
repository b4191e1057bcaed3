"""Tokenizers: modes, the cached wrapper, chat templates (BEHAVIOUR T1-T5)."""

from modelbay.tokenizer.bounded import (
    TooManyTokens,
    encode_at_most,
    encode_beginning,
    encode_end,
    is_long,
    parts_of_pair,
)
from modelbay.tokenizer.cached import cached
from modelbay.tokenizer.chat import check_text, encode_chat, encode_prompt, extra_bos, render_chat, template_text
from modelbay.tokenizer.fastokens import load_fastokens
from modelbay.tokenizer.hf import load_hf, load_slow
from modelbay.tokenizer.ids import check_token_ids, stop_token_ids
from modelbay.tokenizer.load import load_tokenizer

__all__ = [
    "TooManyTokens",
    "cached",
    "check_text",
    "check_token_ids",
    "encode_at_most",
    "encode_beginning",
    "encode_chat",
    "encode_end",
    "encode_prompt",
    "extra_bos",
    "is_long",
    "load_fastokens",
    "load_hf",
    "load_slow",
    "load_tokenizer",
    "parts_of_pair",
    "render_chat",
    "stop_token_ids",
    "template_text",
]
