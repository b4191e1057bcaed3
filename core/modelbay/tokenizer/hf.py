"""The modes that load what Transformers loads (T1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelbay.errors import ModelbayError, RemoteCodeError, TokenizerError, one_line_with_type
from modelbay.trace import Rejected

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

#: Files that hold a vocabulary: without one of them there is no tokenizer. Together with the companions they are what
#: the classes of Transformers name in ``vocab_files_names``, and what it looks for besides.
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.*.json",  # for a version of Transformers
    "*.tiktoken",
    "*.model",
    "*.model.*",
    "*.tokenizer",
    "*.spm",
    "vocab.json",
    "vocab.txt",
    "vocab-src.json",
    "vocab-tgt.json",
    "byte_maps.json",
    "*tekken*.json",
)
#: What else a tokenizer may read. config.json names its class where tokenizer_config.json does not.
COMPANION_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "normalizer.json",
    "target_vocab.json",
    "word_pronunciation.json",
    "word_shape.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "config.json",
)
CONFIG_FILE = "tokenizer_config.json"
#: What no tokenizer reads, whatever its code.
_OTHER_FILES = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.index.json",
    "*.md", "*.py", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", "*.ipynb", "LICENSE*", ".*",
)  # fmt: skip


def tokenizer_names(files: ModelFiles) -> tuple[str, ...]:
    """The files that a tokenizer is made of. Which ones code in the repository reads is not known before it runs: all
    in the root folder that it may."""
    known = files.match(*VOCABULARY_FILES, *COMPANION_FILES)
    if not files.has(CONFIG_FILE) or _remote(files) is None:
        return known
    others = set(files.match(*_OTHER_FILES))
    return (*known, *(name for name in files.names if "/" not in name and name not in others and name not in known))


def has_tokenizer(files: ModelFiles) -> bool:
    """Whether the listing has a vocabulary, or names code that makes the tokenizer."""
    return bool(files.match(*VOCABULARY_FILES)) or (files.has(CONFIG_FILE) and bool(_remote(files)))


def load_hf(files: ModelFiles, config: ModelConfig, args: EngineArgs, trace: Trace) -> Any:
    """What AutoTokenizer loads: the fast tokenizer if there is one.

    Transformers is never allowed to import code from the repository itself: that goes through the trust gate.
    """
    if not has_tokenizer(files):
        raise TokenizerError(
            f"{files.reference} has no tokenizer files (tokenizer.json, tokenizer.model, vocab.json …).",
            hint="Name another directory or hub id with tokenizer=…",
        )
    files.fetch(files.match(*VOCABULARY_FILES, *COMPANION_FILES))
    from transformers import AutoTokenizer

    remote = _remote(files)
    try:
        return AutoTokenizer.from_pretrained(
            str(files.root), config=_type_alone(files), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        if remote is not None:
            return _load_remote(remote, files, args, trace)
        return _load_plain(files, error, trace)


def _type_alone(files: ModelFiles) -> Any:
    """A config that says its model type and nothing else, where tokenizer_config.json names the tokenizer's class.

    AutoTokenizer asks no more of it then; left to itself it imports the model's config class, which takes as long as
    loading the tokenizer, and warns of model types that only a plugin knows.
    """
    said = files.read_json(CONFIG_FILE) or {}
    raw = files.read_json("config.json") or {}
    if not said.get("tokenizer_class") or said.get("auto_map") or not isinstance(raw.get("model_type"), str):
        return None
    from transformers import PreTrainedConfig

    config = PreTrainedConfig()
    for key in ("model_type", "model_name", "tokenizer_class"):
        if raw.get(key) is not None:
            setattr(config, key, raw[key])
    return config


def load_slow(files: ModelFiles, config: ModelConfig, args: EngineArgs, trace: Trace) -> Any:
    """The Python tokenizer, never the Rust one under that name.

    Raises:
        TokenizerError: Transformers has no Python tokenizer for this model (since 5 it has few).
    """
    tokenizer = load_hf(files, config, args, trace)
    if getattr(tokenizer, "is_fast", False):
        import transformers

        raise TokenizerError(
            f"tokenizer_mode 'slow' was asked for, but transformers {transformers.__version__} has no Python tokenizer "
            f"for {files.reference}, only {type(tokenizer).__name__}.",
            hint="Use tokenizer_mode='hf'.",
        )
    return tokenizer


def _remote(files: ModelFiles) -> str | None:
    """The class that ``auto_map`` names for the tokenizer: the fast one if it names two."""
    auto_map = (files.read_json(CONFIG_FILE) or {}).get("auto_map") or {}
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    candidates = named if isinstance(named, list | tuple) else [named]
    return next((name for name in reversed(candidates) if name), None)


def _load_remote(reference: str, files: ModelFiles, args: EngineArgs, trace: Trace) -> Any:
    from modelbay.trust import contained, load_remote_class

    cls = load_remote_class(
        reference,
        files,
        trusted=args.trust_remote_code,
        code_revision=args.code_revision,
        what="the tokenizer class",
        trace=trace,
    )
    trace.decide("tokenizer", "code", reference, f"auto_map of {files.reference}")
    named = getattr(cls, "vocab_files_names", None)
    files.fetch(name for name in (named.values() if isinstance(named, dict) else ()) if files.has(name))
    try:
        with contained(f"the tokenizer class {cls.__name__} of {files.reference}"):
            return cls.from_pretrained(str(files.root), local_files_only=True)
    except RemoteCodeError:
        raise
    except Exception as error:
        raise _failed(files, error) from error


def _load_plain(files: ModelFiles, error: Exception, trace: Trace) -> Any:
    """tokenizer.json alone is enough where AutoTokenizer stumbles over a class or a model type it does not know."""
    if isinstance(error, ModelbayError) or not files.has("tokenizer.json"):
        raise _failed(files, error) from error
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(files.root), local_files_only=True)
    except Exception as second:
        raise _failed(files, second) from error
    rejected = (Rejected("AutoTokenizer", _shortened(error)),)
    trace.decide("tokenizer", "loaded from", "tokenizer.json alone", "fallback", rejected=rejected, level="warning")
    return tokenizer


def _failed(files: ModelFiles, error: Exception) -> TokenizerError:
    return TokenizerError(
        f"cannot load the tokenizer of {files.reference}: {_shortened(error)}.",
        hint="A truncated tokenizer.json? Fetch it again, or name another with tokenizer=…",
    )


def _shortened(error: Exception) -> str:
    return one_line_with_type(error)[:320].rstrip(".")
