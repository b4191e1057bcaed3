"""The tokenizer inside a .gguf file, built by Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelbay.errors import TokenizerError, one_line, one_line_with_type
from modelbay_gguf.files import select
from modelbay_gguf.header import read_header

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

# Byte-level vocabularies whose text is split as GPT-2 split it, which is what Transformers does when its table of
# split patterns has no entry.
_SPLIT_LIKE_GPT2 = {"default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2"}
# Those whose text is split at every digit first, and then as GPT-2 split it. Transformers leaves the first step out:
# two spaces before a number then become other tokens than the model was trained on.
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def load(files: ModelFiles, config: ModelConfig, args: EngineArgs, trace: Trace) -> Any:
    """The tokenizer that ``AutoTokenizer.from_pretrained(..., gguf_file=...)`` returns, without reading the file's
    vocabulary three times as that does, and with the split of the text that the file names where that leaves it out.

    Raises:
        TokenizerError: there is no .gguf file, or its vocabulary is of a kind that Transformers cannot build.
    """
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    names = select(files)
    if not names:
        raise TokenizerError(f"{files.reference} holds no .gguf file to read a tokenizer from.")
    path = files.fetch(names[:1])[0]
    metadata = read_header(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise TokenizerError(f"{path} holds no tokenizer.", hint="Name one with --tokenizer.")
    class_name = TOKENIZER_MAPPING_NAMES.get(config.model_type) or "TokenizersBackend"
    tokenizer_class = tokenizer_class_from_name(class_name)
    try:
        tokenizer = tokenizer_class(name_or_path=str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # its metadata is read without a check: a short list, a word for a number
        what = one_line(error) if isinstance(error, ValueError) else one_line_with_type(error)
        raise TokenizerError(f"Transformers cannot build the tokenizer in {path}: {what}.") from error
    kind = metadata.get("tokenizer.ggml.model")
    source = f"{path.name} (tokenizer.ggml.model)"
    trace.decide("tokenizer", "tokenizer in the checkpoint", f"{kind} as {type(tokenizer).__name__}", source)
    if kind == "gpt2":
        split = metadata.get("tokenizer.ggml.pre", "default")
        _split_text(tokenizer, split, f"{path.name} (tokenizer.ggml.pre)", trace)
    return tokenizer


def _split_text(tokenizer: Any, split: str, source: str, trace: Trace) -> None:
    """How text is split before BPE, where Transformers' table does not say it: digits apart, or a warning."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    question = "how text is split before BPE"
    if split in GGUF_PRE_TOKENIZER_SPLITS or split in _SPLIT_LIKE_GPT2:
        return
    if split not in _DIGITS_APART:
        answer = f"as GPT-2 does: the split {split!r} is not known here, ids may differ on numbers and spaces"
        trace.warn("tokenizer", question, answer, source)
        return
    from tokenizers import pre_tokenizers

    engine = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    engine.pre_tokenizer = pre_tokenizers.Sequence([digits, engine.pre_tokenizer])
    trace.decide("tokenizer", question, f"every digit apart, then as GPT-2 does ({split})", source)
