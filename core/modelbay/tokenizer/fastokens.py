"""The mode that puts the Rust package ``fastokens`` in place of a fast tokenizer's BPE engine, on one instance (T1)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from modelbay.errors import TokenizerError, one_line
from modelbay.tokenizer.cached import ORIGINAL_ENGINE
from modelbay.tokenizer.hf import load_hf

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

ENVIRONMENT = "MODELBAY_USE_FASTOKENS"
TRUE = ("1", "true", "t", "yes", "y", "on")
#: Compared at load on the very tokenizer: spaces, digits, case, code, other scripts, emoji, combining marks.
_PROBES = (
    "Hello, world!  It's 12345.678 o'clock\n\n\tNew line",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # done",
    "Zażółć gęślą jaźń. Grüße! Ελληνικά, русский, हिन्दी, ไทย",
    "中文分词测试。日本語テキスト 한국어 문장입니다.",
    "👩‍👩‍👧‍👦 🇫🇷 e\u0301 a\u0308 \u200b\ufeff|",
)


def load_fastokens(files: ModelFiles, config: ModelConfig, args: EngineArgs, trace: Trace) -> Any:
    """The tokenizer of mode "hf" on the fastokens engine.

    Raises:
        TokenizerError: the package is absent, or the tokenizer is not a byte-level BPE.
    """
    tokenizer = load_hf(files, config, args, trace)
    reason = switch(tokenizer)
    if reason is not None:
        raise TokenizerError(
            f"tokenizer_mode 'fastokens' was asked for, but {reason}.", hint="Use tokenizer_mode='hf'."
        )
    trace.decide("tokenizer", "engine", "fastokens", "tokenizer_mode")
    return tokenizer


def switch_if_asked(tokenizer: Any, trace: Trace) -> Any:
    """Switch when the environment asks for it and the tokenizer can be switched; say in the trace what was done."""
    if os.environ.get(ENVIRONMENT, "").strip().lower() not in TRUE:
        return tokenizer
    reason = switch(tokenizer)
    if reason is None:
        trace.decide("tokenizer", "engine", "fastokens", ENVIRONMENT)
    else:
        trace.warn("tokenizer", "engine", "unchanged", f"{ENVIRONMENT} is set, but {reason}")
    return tokenizer


def switch(tokenizer: Any) -> str | None:
    """Replace the engine of this instance. Returns None if done, else why it was not.

    The engine it had stays on the instance for what fastokens does not do (pairs, words, offsets, token strings).
    """
    if not getattr(tokenizer, "is_fast", False):
        return f"{type(tokenizer).__name__} is not a fast tokenizer"
    try:
        from fastokens._compat import _TokenizerShim
    except ImportError as error:
        return f"the package fastokens is not usable ({error}): pip install 'modelbay[fastokens]'"
    original = tokenizer._tokenizer
    try:
        engine = _TokenizerShim(original)
    except ValueError as error:
        return f"fastokens takes only byte-level BPE tokenizers: {one_line(error)}"
    try:
        different = next((text for text in _PROBES if _ids(engine, text) != _ids(original, text)), None)
    except ValueError as error:  # a vocabulary without all bytes: the tokenizer itself drops them
        return f"fastokens cannot encode every text with it: {one_line(error)}"
    if different is not None:
        return f"fastokens gives other ids than the tokenizer itself for {different!r}"
    tokenizer._tokenizer = engine
    tokenizer.__dict__[ORIGINAL_ENGINE] = original
    return None


def _ids(engine: Any, text: str) -> list[int]:
    return list(engine.encode_batch([text], add_special_tokens=True)[0].ids)
