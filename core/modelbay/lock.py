"""One file that pins a run: what it was made of, by content; a locked run refuses what differs and says what.

The file is JSON with the keys format, model, tokenizer, code, args, resolution, versions and plugins. ``model``,
``tokenizer`` (null: the model's) and each of ``code`` have a repository's id (null for a directory), its commit, and
the SHA-256 of each file that is used. A directory with the same content is the same model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelbay import lock_file
from modelbay.args import EngineArgs
from modelbay.config.dtype import BACKBONE
from modelbay.errors import LockError, SourceError, UsageError
from modelbay.small_files import read_text

if TYPE_CHECKING:
    from modelbay.plugins import Plugins
    from modelbay.resolve import Resolution
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")

#: Engine arguments that change what comes out; the others change how fast, or are pinned as content.
_PINNED = (
    "tokenizer_mode", "model_impl", "runner", "convert", "load_format", "dtype", "max_model_len", "hf_overrides",
    "generation_config", "quantization", "kernels", "attention_backend", "pooler_config", "seed",
)  # fmt: skip

#: What is read of a model besides weights and tokenizer.
_CONFIG_FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "modules.json", "config_sentence_transformers.json", "sentence_*_config.json",
    "*.index.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lock:
    """The content of a lock file. ``data`` has the keys that the module describes, without ``format``."""

    data: Mapping[str, Any]

    def pin(self, args: EngineArgs, trace: Trace) -> EngineArgs:
        """The arguments with what the lock says where they say nothing: settings, and the commits to take."""
        pinned = {
            name: self.data["args"][name]
            for name in _PINNED
            if name in self.data["args"] and getattr(args, name) == _default(name)
        }
        model, tokenizer = self.data["model"], self.data["tokenizer"]
        commits = {entry["commit"] for entry in self.data["code"] if entry["commit"] not in (None, model["commit"])}
        if args.revision is None and args.model == model["repository"]:
            pinned["revision"] = model["commit"]
        if args.code_revision is None and len(commits) == 1:
            pinned["code_revision"] = commits.pop()
        if tokenizer and args.tokenizer in (None, tokenizer["repository"]):
            pinned["tokenizer"] = tokenizer["reference"]
            if tokenizer["commit"] and args.tokenizer_revision is None:
                pinned["tokenizer_revision"] = tokenizer["commit"]
        trace.decide("source", "lock", {"file": args.locked, "pinned": pinned}, trace.argument("locked"))
        for name, value in pinned.items():
            trace.decide("source", f"argument {name}", value, f"{args.locked}, by argument locked")
        return args.replace(**pinned)

    def check(self, resolution: Resolution) -> None:
        """Refuse a resolution that differs.

        Raises:
            LockError: naming everything that differs.
        """
        now = Lock.of(resolution)
        differences = list(_differences(self.data, now.data))
        if differences:
            listed = "; ".join(differences[:10]) + (f"; and {len(differences) - 10} more" if differences[10:] else "")
            raise LockError(
                f"this run is not the one of {resolution.args.locked}: {listed}.",
                hint="Get what is locked, or write a new lock with: modelbay lock",
            )
        count = sum(len(entry["files"]) for _, entry in _repositories(now.data))
        resolution.trace.decide(
            "source", "lock check", f"{count} files, versions and settings are as locked", "SHA-256"
        )

    @classmethod
    def of(cls, resolution: Resolution) -> Lock:
        """What this resolution would run, hashed. Of what is not on disk yet the hub's own SHA-256 is taken.

        Raises:
            SourceError, WeightsError: a file that is needed is absent.
        """
        args, files = resolution.args, resolution.files
        tokenizer = _tokenizer_files(resolution)
        weights, load_format = _weights(resolution)
        own = set(weights) | set(_config_files(resolution))
        if tokenizer is files:
            own |= set(_tokenizer_names(files))
        other = None if tokenizer is files else _entry(tokenizer, _tokenizer_names(tokenizer), args.tokenizer)
        return cls(
            {
                "model": _entry(files, own, files.reference),
                "tokenizer": other,
                "code": list(_code(resolution, tokenizer)),
                "args": {
                    name: _plain(getattr(args, name)) for name in _PINNED if getattr(args, name) != _default(name)
                },
                "resolution": _resolved(resolution, load_format),
                "versions": _versions(),
                "plugins": _distributions(resolution.plugins),
            }
        )

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            UsageError: the path is something else than a file: a rename would take its place, a device's too.
        """
        path = Path(os.path.realpath(path))  # through a link, not over it
        if not path.name or (path.exists() and not path.is_file()):
            raise UsageError(f"{str(path)!r} is no file that a lock could be written to.")
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            temporary.write_text(self.to_json(), encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def to_json(self) -> str:
        return lock_file.to_json(self.data)


def read_lock(path: str) -> Lock:
    """The lock that was written to this file.

    Raises:
        UsageError: there is no such file, or it is no lock.
    """
    try:
        return Lock(lock_file.from_json(read_text(Path(path)), _PINNED))
    except OSError as error:
        raise UsageError(f"cannot read the lock {path}: {error.strerror}.", hint="Write one: modelbay lock") from error
    except ValueError as error:  # what is no JSON or no UTF-8 is a ValueError too
        raise UsageError(
            f"{path} is not a lock that this version reads: {error}.",
            hint="Write it again: modelbay lock",
        ) from error


# -- what is used


def _resolved(resolution: Resolution, load_format: str) -> dict[str, Any]:
    from modelbay.config.generation import is_elsewhere

    config, args = resolution.config, resolution.args
    found: dict[str, Any] = {
        "architecture": resolution.architecture,
        "served_by": resolution.arch.name if resolution.arch else None,
        "task": resolution.task,
        "backend": resolution.backend,
        "load_format": load_format,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
    }
    if is_elsewhere(args.generation_config):
        found["generation_config"] = json.dumps([_plain(config.generation), list(config.eos_token_ids)], sort_keys=True)
    return found


def _tokenizer_files(resolution: Resolution) -> ModelFiles:
    from modelbay.tokenizer.load import tokenizer_files

    formats = [owned.value for owned in resolution.plugins.all("load_formats") if owned.value.tokenizer_mode]
    return tokenizer_files(resolution.files, formats, resolution.args, resolution.trace)


def _tokenizer_names(files: ModelFiles) -> list[str]:
    from modelbay.tokenizer.hf import tokenizer_names

    return [files.entry] if files.entry else list(tokenizer_names(files))


def _config_files(resolution: Resolution) -> list[str]:
    """Configs, and of a model that pools what its modules are made of, down to weights."""
    from modelbay.pooling.modules import module_folders

    files = resolution.files
    if files.entry:
        return []
    folders = () if resolution.pooling is None else module_folders(files)
    inside = [name for name in files.names if name.startswith(tuple(f"{folder}/" for folder in folders))]
    return [*files.match(*_CONFIG_FILES), *inside]


def _weights(resolution: Resolution) -> tuple[tuple[str, ...], str]:
    from modelbay.weights.choose import choose_format

    spec, load_format = choose_format(
        resolution.args.load_format, resolution.files, resolution.plugins, resolution.trace
    )
    return load_format.select(resolution.files), spec.name


def _code(resolution: Resolution, tokenizer: ModelFiles) -> Iterator[dict[str, Any]]:
    """The code that may run: none without trust."""
    from modelbay.remote_code.references import all_code

    if not resolution.args.trust_remote_code:
        return
    owners = {"model": resolution.files}
    if tokenizer is not resolution.files:
        owners["tokenizer"] = tokenizer
    for owner, files in owners.items():
        for code, closure in all_code(files, resolution.args.code_revision, resolution.trace):
            yield {"of": owner, **_identity(code, code.reference), "files": closure.digests()}


def _identity(files: ModelFiles, reference: str | None) -> dict[str, Any]:
    return {"reference": reference, "repository": files.repo_id, "commit": files.commit}


def _entry(files: ModelFiles, names: Iterable[str], reference: str | None) -> dict[str, Any]:
    wanted = sorted(set(names))
    # In one go, since some of them may have to be downloaded.
    files.fetch([name for name in wanted if not (files.root / name).is_file() and not _announced(files, name)])
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(lambda name: _sha256(files, name), wanted))
    return {**_identity(files, reference), "files": dict(zip(wanted, digests, strict=True))}


def _announced(files: ModelFiles, name: str) -> str | None:
    """The SHA-256 in the hub's listing, against which a download is checked."""
    return files.tree[name].sha256 if name in files.tree else None


def _sha256(files: ModelFiles, name: str) -> str:
    path = files.root / name
    announced = _announced(files, name)
    if announced and not path.is_file():
        return announced
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}.") from error


def _versions() -> dict[str, str]:
    from modelbay import __version__

    versions = {"modelbay": __version__}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _distributions(plugins: Plugins) -> dict[str, str]:
    """The version of every distribution whose plugins are loaded, but the core's."""
    from modelbay.registry import IN_PROCESS

    loaded = [record for record in plugins.records if record.status == "loaded" and record.name != "core"]
    versions = {
        f"{record.distribution} {record.name}"
        if record.distribution == IN_PROCESS
        else record.distribution: record.version
        for record in loaded
    }
    return dict(sorted(versions.items()))


def _default(name: str) -> Any:
    return next(entry.default for entry in dataclasses.fields(EngineArgs) if entry.name == name)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_json_of))


def _json_of(value: Any) -> Any:
    """Mappings of other kinds; paths and torch's dtypes, as the command line says them."""
    return dict(value) if isinstance(value, Mapping) else str(value).removeprefix("torch.")


# -- what differs


def _repositories(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "model", data["model"]
    if data["tokenizer"]:
        yield "tokenizer", data["tokenizer"]
    for entry in data["code"]:
        yield f"code of the {entry['of']}{' in ' + entry['repository'] if entry['repository'] else ''}", entry


#: Arguments that are there to decide something, and what they decide: another one that comes to the same is the same.
_DECIDES = {
    "runner": "task", "convert": "task", "model_impl": "backend", "load_format": "load_format", "dtype": "dtype",
    "max_model_len": "max_model_len",
}  # fmt: skip


def _same_decision(name: str, locked: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether what an argument decides is as it was. A dtype for each backbone is more than the one that is noted."""
    decided = _DECIDES.get(name)
    if decided is None or BACKBONE in (locked["args"].get(name), now["args"].get(name)):
        return False
    return locked["resolution"].get(decided) == now["resolution"].get(decided)


def _differences(locked: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Everything that differs, in words, what explains the rest first."""
    for section, what in (("versions", ""), ("plugins", "plugin "), ("args", "argument "), ("resolution", "")):
        for name in {**locked[section], **now[section]}:
            unsaid = _default(name) if section == "args" and name in _PINNED else None
            before, here = locked[section].get(name, unsaid), now[section].get(name, unsaid)
            if before != here and not (section == "args" and _same_decision(name, locked, now)):
                yield f"{what}{name}: locked {_said(before)}, here {_said(here)}"
    before, here = dict(_repositories(locked)), dict(_repositories(now))
    for role in {**before, **here}:
        if role not in here:
            yield f"{role}: locked, not used here"
        elif role not in before:
            yield f"{role}: used here, not locked"
        else:
            yield from _changed(role, before[role], here[role])


def _changed(role: str, locked: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in ("repository", "commit"):
        if locked[key] and now[key] and locked[key] != now[key]:
            yield f"{role}: {key} locked {locked[key]}, here {now[key]}"
    for name in sorted({**locked["files"], **now["files"]}):
        if name not in now["files"]:
            yield f"{role} file {name}: locked, absent here"
        elif name not in locked["files"]:
            yield f"{role} file {name}: not locked"
        elif locked["files"][name] != now["files"][name]:
            yield f"{role} file {name} has another content"


def _said(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
