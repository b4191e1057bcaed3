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


def load(files: ModelFiles, config: ModelConfig, args: EngineArgs, trace: Trace) -> Any:
    """The tokenizer that ``AutoTokenizer.from_pretrained(..., gguf_file=...)`` returns, without reading the file's
    vocabulary three times as that does.

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
    _decide(metadata, str(path), tokenizer, trace)
    return tokenizer


def _decide(metadata: dict[str, Any], path: str, tokenizer: Any, trace: Trace) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    trace.decide("tokenizer", "tokenizer in the checkpoint", f"{kind} as {type(tokenizer).__name__}", path)
    if kind == "gpt2" and split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _SPLIT_LIKE_GPT2:
        trace.warn(
            "tokenizer",
            "how text is split before BPE",
            f"as GPT-2 does: Transformers does not know the split {split!r}, ids may differ on numbers and spaces",
            "tokenizer.ggml.pre",
        )
