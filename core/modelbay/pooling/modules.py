"""``modules.json`` and the folders that it names: what sentence-transformers does after the model.

Nothing that it names is imported: types are compared by name, and one that is not known needs trust (BEHAVIOUR P2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelbay.errors import ConfigError, TrustError
from modelbay.pooling.names import MODE_KEYS, MODES
from modelbay.pooling.transformer import max_length, read_transformer
from modelbay.pooling.values import boolean, positive
from modelbay.small_files import read_text

if TYPE_CHECKING:
    from modelbay.source import ModelFiles

MODULES, SENTENCE = "modules.json", "config_sentence_transformers.json"
DEFAULT_POOLING = "1_Pooling"
_OWN = "sentence_transformers."
#: Modules that may follow the pooling, and what they are here. Dropout does nothing once training is over.
_STAGES = {"Dense": "dense", "LayerNorm": "layer_norm", "Normalize": "normalize", "Dropout": None}
_SIZES = ("embedding_dimension", "word_embedding_dimension")


@dataclass(frozen=True, slots=True)
class Stage:
    """One module after the pooling: "dense", "layer_norm", "normalize", or "remote" for a class of the repository.

    Args:
        folder: where its config and weights are. config: its ``config.json``.
        reference: of a "remote" one: ``module.Class``.
    """

    kind: str
    folder: str
    config: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """What the files of sentence-transformers say.

    Args:
        modes: how one vector is made, of `MODES`' values, several concatenated; None if no file says.
        size: entries of a token's vector, as the pooling's config has it.
        listed: whether there is a ``modules.json``, which then says everything that is done.
        include_prompt: whether the tokens of a prompt that was put before a text are pooled too.
        prompts: name -> text to put before. max_length: in tokens. lower_case: whether texts are lower-cased first.
        as_messages: whether texts are put into the chat template first.
        made_for: the library's class that saved it: "SentenceTransformer" where the files do not say.
    """

    modes: tuple[str, ...] | None = None
    size: int | None = None
    stages: tuple[Stage, ...] = ()
    listed: bool = False
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    lower_case: bool = False
    as_messages: bool = False
    activation: str | None = None
    made_for: str = "SentenceTransformer"
    source: str = ""


def pooling_module(files: ModelFiles) -> str | None:
    """The type of the module that says how hidden states are pooled, which makes it a checkpoint that embeds."""
    types = (entry["type"] for entry in _listed(files))
    return next((kind for kind in types if "Pooling" in kind.rpartition(".")[2]), None)


def module_folders(files: ModelFiles) -> tuple[str, ...]:
    """The folders that `read_modules` looks into; without a ``modules.json`` that of a pooling config alone."""
    entries = _listed(files)
    return tuple(entry["path"] for entry in entries if entry["path"]) if entries else (DEFAULT_POOLING,)


def read_modules(files: ModelFiles, *, trusted: bool) -> SentenceModules:
    """Everything that the files of sentence-transformers say; of a checkpoint without them, nothing.

    Raises:
        ConfigError: a file that cannot be read, a module that is not served, or one in a place where it makes no sense.
        TrustError: a module whose code is in the repository, and is not trusted.
    """
    entries = _listed(files)
    folder, stages = _sequence(entries, files, trusted) if entries else (DEFAULT_POOLING, ())
    config = _module_config(files, folder, needed=bool(entries)) if folder is not None else None
    where = f"{folder}/config.json"
    sentence, transformer = files.read_json(SENTENCE) or {}, read_transformer(files)
    prompts = _prompts(sentence)
    return SentenceModules(
        modes=None if config is None else pooling_modes(config, where),
        size=None if config is None else _size(config, where),
        stages=stages,
        listed=bool(entries),
        include_prompt=config is None or boolean(config, "include_prompt", True, where),
        prompts=prompts,
        default_prompt=_default_prompt(sentence, prompts),
        max_length=length[0] if (length := max_length(files)) else None,
        lower_case=transformer.lower_case,
        as_messages=transformer.as_messages,
        activation=sentence.get("activation_fn"),
        made_for=sentence.get("model_type") or "SentenceTransformer",
        source=where if config is not None else MODULES if entries else "",
    )


def pooling_modes(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The modes of a pooling config, in the old schema (a boolean for each) or the new one (``pooling_mode``).

    Raises:
        ConfigError: a mode that is not known, or a value that is none.
    """
    said = config.get("pooling_mode")
    if said is not None:
        names = (said,) if isinstance(said, str) else said
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{where} has pooling_mode {said!r}, which is no name and no list of names.")
        unknown = [name for name in names if name not in MODES]
        if unknown:
            known = ", ".join(MODES)
            raise ConfigError(f"{where} has the pooling mode {unknown[0]!r}, which is not known; known: {known}.")
        return tuple(MODES[name] for name in names)
    flags = {key: boolean(config, key, False, where) for key in config if key.startswith("pooling_mode_")}
    unknown = [key for key in flags if key not in MODE_KEYS]
    if unknown:
        raise ConfigError(f"{where} has {unknown[0]}, which is not known; known: {', '.join(MODE_KEYS)}.")
    # Neither schema in it, or nothing chosen: the mean, as the library that writes these files has it.
    return tuple(mode for key, mode in MODE_KEYS.items() if flags.get(key)) or ("mean",)


def _sequence(entries: list[dict[str, str]], files: ModelFiles, trusted: bool) -> tuple[str | None, tuple[Stage, ...]]:
    """The folder of the pooling module, and what follows it."""
    first, *rest = entries
    if _own_name(first) != "Transformer" or first["path"]:
        _check_known(first, files, trusted)
        raise ConfigError(
            f"{MODULES} begins with {first['type']} in {first['path'] or 'the root'!r}; "
            "served is a Transformer in the root."
        )
    folder: str | None = None
    stages: list[Stage] = []
    for entry in rest:
        name = _own_name(entry)
        if name == "Pooling" and folder is None and not stages:
            folder = entry["path"]
            continue
        if name is not None and name in _STAGES:
            kind = _STAGES[name]
            if kind is not None:
                stages.append(_stage(kind, entry["path"], files))
            continue
        _check_known(entry, files, trusted)
        stages.append(Stage("remote", entry["path"], reference=entry["type"]))
    return folder, tuple(stages)


def _own_name(entry: Mapping[str, str]) -> str | None:
    """The last part of a type of sentence-transformers; None for a type of somebody else."""
    return entry["type"].rpartition(".")[2] if entry["type"].startswith(_OWN) else None


def _check_known(entry: Mapping[str, str], files: ModelFiles, trusted: bool) -> None:
    """Raises:
    ConfigError: a module of sentence-transformers that is not served here.
    TrustError: a type that would have to be imported, and is not trusted.
    """
    if _own_name(entry) is not None:
        served = ", ".join(("Transformer", "Pooling", *_STAGES))
        raise ConfigError(f"{MODULES} has {entry['type']} ({entry['path']}), which is not served; served: {served}.")
    if trusted is not True:
        raise TrustError(
            f"{MODULES} of {files.reference} has the module {entry['type']}, which is no module of "
            "sentence-transformers, and code from model repositories is not trusted.",
            hint="Read that code, then pass --trust-remote-code (trust_remote_code=True) to let it run.",
        )


def _stage(kind: str, folder: str, files: ModelFiles) -> Stage:
    config = _module_config(files, folder, needed=kind != "normalize") or {}
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ConfigError(
                f"{folder}/config.json has {key} {config[key]!r}; served is what changes the sentence_embedding."
            )
    return Stage(kind, folder, config)


def _module_config(files: ModelFiles, folder: str, *, needed: bool) -> dict[str, Any] | None:
    name = f"{folder}/config.json"
    config = files.read_json(name)
    if config is None and needed:
        raise ConfigError(
            f"{MODULES} of {files.reference} names the module {folder!r}, and there is no {name}.",
            hint="Download the model again.",
        )
    return config


def _listed(files: ModelFiles) -> list[dict[str, str]]:
    """The entries of modules.json: each has a ``type`` and a ``path``."""
    path = files.path(MODULES)
    if path is None:
        return []
    try:
        entries = json.loads(read_text(path, encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON that can be read: {error}.") from error
    valid = isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)
        for entry in entries
    )
    if not valid or not entries:
        raise ConfigError(f"{path}: a list of modules is needed, each with a type and a path.")
    return list(entries)


def _size(config: Mapping[str, Any], where: str) -> int | None:
    return next((size for key in _SIZES if (size := positive(config, key, "size", where)) is not None), None)


def _prompts(sentence: Mapping[str, Any]) -> dict[str, str]:
    prompts = sentence.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ConfigError(f"{SENTENCE} has prompts that are no object of names and texts.")
    return {str(name): text or "" for name, text in prompts.items()}


def _default_prompt(sentence: Mapping[str, Any], prompts: Mapping[str, str]) -> str | None:
    name = sentence.get("default_prompt_name")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{SENTENCE} has default_prompt_name {name!r}, which is no name.")
    if name is not None and name not in prompts:
        known = ", ".join(prompts) or "none"
        raise ConfigError(f"{SENTENCE} has default_prompt_name {name!r}, and no such prompt (it has: {known}).")
    return name
