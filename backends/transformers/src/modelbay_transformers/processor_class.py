"""Which class of Transformers (or of the repository, if trusted) is a model's processor, and an instance of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from modelbay.errors import UsageError, one_line
from modelbay.resolve import Resolution
from modelbay.source import ModelFiles
from modelbay.trust import load_remote_class

#: Where a repository says what its processor is, the first that says it.
_SAID_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_VIDEOS = "video_processor"
_FILES = ("*processor*.json", "*tokenizer*", "*.jinja", "config.json", "special_tokens_map.json", "added_tokens.json",
          "vocab*", "merges.txt", "chat_template*")  # fmt: skip


def load_processor(resolution: Resolution, tokenizer: Any) -> Any:
    """The processor from the model's files at its commit, around ``tokenizer``.

    Raises:
        UsageError: the model's files name none, or Transformers cannot load it.
        TrustError: it is code in the repository, and that is not trusted.
    """
    files = resolution.files
    cls = _processor_class(resolution)
    files.fetch(_wanted(files))
    try:
        processor = with_parts(cls, tokenizer).from_pretrained(
            str(files.root), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise UsageError(f"{cls.__name__} of {files.reference} cannot be loaded: {one_line(error)}.") from error
    resolution.trace.decide("tokenizer", "processor", cls.__name__, f"{files.reference}, with our tokenizer")
    return processor


def _processor_class(resolution: Resolution) -> Any:
    """Transformers' own class where it has one for this type: then no code of the repository runs."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files, model_type = resolution.files, resolution.config.model_type
    said = list(_said(files))
    names = [found["processor_class"] for found in said if isinstance(found.get("processor_class"), str)]
    listed = PROCESSOR_MAPPING_NAMES.get(model_type)
    for name in [*names, listed]:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if found is not None:
            return found
    for config in [*said, dict(resolution.config.raw)]:
        reference = (config.get("auto_map") or {}).get("AutoProcessor")
        if isinstance(reference, str):
            args = resolution.args
            return load_remote_class(
                reference, files, trusted=args.trust_remote_code, code_revision=args.code_revision,
                what="the processor", trace=resolution.trace,
            )  # fmt: skip
    raise UsageError(
        f"{files.reference} names no processor, and Transformers has none for model_type {model_type!r}, so that "
        "images and audio cannot be prepared."
    )


def _said(files: ModelFiles) -> Iterable[dict[str, Any]]:
    for name in _SAID_IN:
        path = files.path(name)
        if path is None:
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{name} of {files.reference} is not JSON: {error}.") from error
        if isinstance(found, dict):
            yield found


def _wanted(files: ModelFiles) -> tuple[str, ...]:
    return files.match(*_FILES)


class NoVideos:
    """In the place of a processor of videos, which are not served: theirs needs packages that the others do not."""


def with_parts(cls: Any, tokenizer: Any) -> Any:
    """The class, which takes this tokenizer instead of loading one, and needs no processor of videos."""

    class Part(cls):
        @classmethod
        def _get_arguments_from_pretrained(cls, path: Any, processor_dict: Any = None, **kwargs: Any) -> list[Any]:
            return [cls._part(name, path, processor_dict, kwargs) for name in cls.get_attributes()]

        @classmethod
        def _part(cls, name: str, path: Any, processor_dict: Any, kwargs: dict[str, Any]) -> Any:
            if name == "tokenizer":
                return tokenizer
            if name == _VIDEOS:
                return NoVideos()
            base: Any = cls.__base__
            one: Any = type(cls.__name__, (base,), {"get_attributes": classmethod(lambda _: [name])})
            return one._get_arguments_from_pretrained(path, processor_dict, **kwargs)[0]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if isinstance(argument, NoVideos):
                return NoVideos
            return super().check_argument_for_proper_class(argument_name, argument)

        def __repr__(self) -> str:  # Transformers logs it, as JSON of all parts
            return cls.__name__

    Part.__name__, Part.__qualname__, Part.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Part
