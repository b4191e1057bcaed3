"""Which tokenizer, from which repository at which commit, in which mode (T1, S2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelbay.errors import UsageError
from modelbay.source import find_repository
from modelbay.specs import LoadFormatSpec, load_target
from modelbay.tokenizer.cached import cached
from modelbay.tokenizer.fastokens import switch_if_asked
from modelbay.tokenizer.hf import CONFIG_FILE as TOKENIZER_FILE
from modelbay.tokenizer.hf import has_tokenizer
from modelbay.trace import Rejected

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace


def load_tokenizer(files: ModelFiles, config: ModelConfig, plugins: Plugins, args: EngineArgs, trace: Trace) -> Any:
    """The tokenizer as Transformers returns it, its expensive attributes cached, safe to use from many threads.

    Raises:
        UsageError: nobody offers the mode.
        TokenizerError: there is none, or it cannot be loaded in the mode that was asked for.
        TrustError: only code in the repository could load it, and it is not trusted.
    """
    formats = [owned.value for owned in plugins.all("load_formats") if owned.value.tokenizer_mode]
    found = tokenizer_files(files, formats, args, trace)
    mode, source = _mode(found, formats, args, trace)
    owned = plugins.named("tokenizer_modes", mode, "tokenizer_mode")
    trace.decide("tokenizer", "mode", mode, f"{source}, offered by {owned.owner}")
    tokenizer = load_target(owned.value.target)(found, config, args, trace)
    if args.tokenizer_mode == "auto":
        tokenizer = switch_if_asked(tokenizer, trace)
    tokenizer = cached(tokenizer)
    _trace_facts(tokenizer, config, _template_source(found, mode), trace)
    return tokenizer


def tokenizer_files(files: ModelFiles, formats: list[LoadFormatSpec], args: EngineArgs, trace: Trace) -> ModelFiles:
    """The files of the tokenizer's repository.

    The model's own commit serves when the repository is the same and no other revision is asked for. Another
    repository never gets the model's revision (S2).
    """
    same = args.tokenizer is None or args.tokenizer in (files.reference, files.repo_id)
    if same and args.tokenizer_revision in (None, files.revision, files.commit):
        trace.decide("tokenizer", "repository", files.reference, "the model's")
        return files
    if same and files.kind == "local":
        raise UsageError(
            f"tokenizer_revision {args.tokenizer_revision!r} was given, but {files.reference!r} is a local path, "
            "which has no revisions."
        )
    reference = files.repo_id if same and files.repo_id else args.tokenizer
    assert reference is not None
    rejected: tuple[Rejected, ...] = ()
    if not same and args.revision is not None and args.tokenizer_revision is None:
        rejected = (Rejected(args.revision, "the model's revision; this is another repository"),)
    trace.decide("tokenizer", "repository", reference, trace.argument("tokenizer"), rejected=rejected)
    suffixes = tuple(suffix for spec in formats for suffix in spec.suffixes)
    return find_repository(reference, revision=args.tokenizer_revision, file_suffixes=suffixes, trace=trace)


def _mode(files: ModelFiles, formats: list[LoadFormatSpec], args: EngineArgs, trace: Trace) -> tuple[str, str]:
    """The mode and why. A checkpoint file that carries its tokenizer serves itself, or a directory without one."""
    if args.tokenizer_mode != "auto":
        return args.tokenizer_mode, trace.argument("tokenizer_mode")
    for spec in formats:
        assert spec.tokenizer_mode is not None
        if files.entry is not None and files.entry.endswith(spec.suffixes):
            return spec.tokenizer_mode, f"{files.entry} carries its tokenizer"
        if not has_tokenizer(files) and files.match(*(f"*{suffix}" for suffix in spec.suffixes)):
            return spec.tokenizer_mode, f"no tokenizer files, and {spec.name} checkpoints carry one"
    return "hf", "default"


def _template_source(files: ModelFiles, mode: str) -> str:
    """Where a chat template comes from, if there is one: a file of its own, or what the tokenizer is made of."""
    if mode not in ("hf", "slow", "fastokens"):
        return f"tokenizer mode {mode!r}"
    own = next((name for name in ("chat_template.jinja", "chat_template.json") if files.has(name)), None)
    return own or f"{TOKENIZER_FILE} (chat_template)"


def _trace_facts(tokenizer: Any, config: ModelConfig, template_source: str, trace: Trace) -> None:
    kind = "fast" if getattr(tokenizer, "is_fast", False) else "slow (Python)"
    trace.decide("tokenizer", "class", type(tokenizer).__bases__[-1].__name__, kind)
    trace.decide("tokenizer", "tokens", len(tokenizer), "tokenizer")
    template = getattr(tokenizer, "chat_template", None)
    trace.decide("tokenizer", "chat template", bool(template), template_source if template else "no file has one")
    if tokenizer.max_token_id >= config.vocab_size:
        trace.warn(
            "tokenizer",
            "ids beyond the model's vocabulary",
            f"up to {tokenizer.max_token_id}, model has {config.vocab_size}",
            "a text that uses them will be refused",
        )
