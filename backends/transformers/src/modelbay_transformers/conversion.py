"""Transformers' own conversion mappings as Modelbay's transforms.

Checkpoints keep the names and layouts that their authors gave them (an expert a tensor, ``embed_out``), Transformers'
modules have others, and Transformers says for each model how to get from one to the other. What it says is read from
an instance and compiled to data; nothing of Transformers runs while weights are loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from modelbay.errors import BackendError
from modelbay.weights.transforms import (
    Chain,
    Concat,
    FirstOf,
    Ignore,
    Rename,
    Reshape,
    Split,
    Stack,
    Transform,
    Transpose,
)
from modelbay_transformers.experts import expert_chains

IGNORED = "ignored by Transformers on load"
NOT_OF_BASE = "not of the base model"
NOT_BUILT = "left out of the base model"

#: Ends a name that is still inside a converter; no parameter's name has it.
_MARK = "#"


@dataclass(frozen=True, slots=True)
class Conversion:
    """How checkpoints of a model are laid out, in the words of `modelbay_runtime.layout`."""

    transforms: tuple[Transform, ...]
    prefixes: tuple[str, ...]
    optional: tuple[str, ...]

    def attach(self, module: nn.Module) -> None:
        """Tell the loader."""
        module.checkpoint_transforms = self.transforms  # type: ignore[assignment]
        module.checkpoint_prefixes = self.prefixes  # type: ignore[assignment]
        module.checkpoint_optional = self.optional  # type: ignore[assignment]


def read_conversion(model: nn.Module, *, base_only: bool) -> Conversion:
    """What Transformers says about checkpoints of ``model``.

    Args:
        model: as Transformers built it, before anything in it is replaced; parameters may be on meta.
        base_only: it serves hidden states, so that a head in the checkpoint is not used.

    Raises:
        BackendError: a conversion that cannot be expressed, by its name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    prefix = getattr(model, "base_model_prefix", "") or ""
    prefixes = (f"{prefix}.",) if prefix else ()
    transforms = (
        *_class_renames(model),
        *compile_mapping(get_model_conversion_mapping(model), model.config),
        *_first_of(expert_chains(model, prefixes)),
        *_ignores(model, prefix if base_only else ""),
    )
    return Conversion(transforms, prefixes, tuple(sorted(_patterns(model, "_keys_to_ignore_on_load_missing"))))


def compile_mapping(mapping: Sequence[Any], config: Any) -> tuple[Transform, ...]:
    """Transformers' ``WeightTransform`` objects: every renaming in turn, then the first converter that matches.

    Raises:
        BackendError: one that cannot be expressed, by its name.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renames: list[Transform] = []
    chains: list[Chain] = []
    for entry in mapping:
        if isinstance(entry, WeightRenaming):
            renames += _renaming(entry, config)
        elif isinstance(entry, WeightConverter):
            chains.append(_converter(entry, config))
        else:
            raise _unknown(type(entry).__name__, entry)
    return (*renames, *_first_of(chains))


def _first_of(chains: Sequence[Chain]) -> tuple[Transform, ...]:
    return (FirstOf(tuple(chains)),) if chains else ()


def leave_out_pooler(model: nn.Module) -> None:
    """Take away what computes one vector of a sequence, as ``add_pooling_layer=False`` does: hidden states do not need
    it, and checkpoints of language models lack it."""
    pooler = model._modules.get("pooler")
    if pooler is not None and "add_pooling_layer" in inspect.signature(type(model)).parameters:
        del model._modules["pooler"]
        model.pooler = None  # type: ignore[assignment]


def _class_renames(model: nn.Module) -> tuple[Transform, ...]:
    """Transformers 4 had renames on the class (the first that matches holds), and code in repositories still has."""
    mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    return _first_of([Chain((pattern,), (Rename(pattern, replacement),)) for pattern, replacement in mapping.items()])


def _ignores(model: nn.Module, base_prefix: str) -> Iterable[Transform]:
    for pattern in sorted(_patterns(model, "_keys_to_ignore_on_load_unexpected")):
        yield Ignore(pattern, IGNORED, unless_known=True)
    if base_prefix:
        # What is neither under the prefix nor under a child of the base model: the head of another class.
        inside = [base_prefix, *model._modules, *model._parameters, *model._buffers]
        yield Ignore(rf"^(?!(?:{_any(inside)})(?:\.|$))", NOT_OF_BASE, unless_known=True)
        absent = [name for name, value in vars(model).items() if value is None and not name.startswith("_")]
        if absent:
            yield Ignore(rf"^(?:{re.escape(base_prefix)}\.)?(?:{_any(absent)})\.", NOT_BUILT, unless_known=True)


def _patterns(model: nn.Module, attribute: str) -> Iterable[str]:
    return getattr(model, attribute, None) or ()


def _any(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names)


# Renamings


def _renaming(entry: Any, config: Any) -> list[Transform]:
    from transformers.core_model_loading import (
        Inkling2IndexOffsetWeightRename,
        LayerPairCollapse,
        PrefixChange,
        WeightRenaming,
    )

    if type(entry) in (WeightRenaming, PrefixChange):
        return [_rename(entry, _source(source), entry.target_patterns[0]) for source in entry.source_patterns]
    if type(entry) is LayerPairCollapse:
        return _layer_pairs(_layers(config))
    if type(entry) is Inkling2IndexOffsetWeightRename:
        (source,), (target,) = entry.source_patterns, entry.target_patterns
        return [
            _rename(
                entry, _source(source.replace(r"(\d+)", f"{i}(?!\\d)")), target.replace(r"\1", str(i + entry.offset))
            )
            for i in range(_layers(config))
        ]
    raise _unknown(type(entry).__name__, entry)


def _rename(entry: Any, source: str, target: str) -> Transform:
    rename = Rename(source, _replacement(target), 1)
    within = _within(entry)
    return Chain((source,), (rename,), within) if within else rename


def _layers(config: Any) -> int:
    return int(config.get_text_config().num_hidden_layers)


def _layer_pairs(layers: int) -> list[Transform]:
    """Attention and MLP of one layer are numbered as two on disk."""
    renames: list[Transform] = []
    for number in range(2 * layers):
        names = {"mixer": ("self_attn", "mlp")[number % 2], "attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}
        renames += [
            Rename(rf"layers\.{number}\.{disk}(?=\.|$)", f"layers.{number // 2}.{ours}", 1)
            for disk, ours in names.items()
        ]
    return renames


def _source(pattern: str, *, index: bool = False) -> str:
    """A source pattern of Transformers as a regular expression: ``*.`` stands for anything, or for a number, and a
    pattern that ends in a letter or digit ends on the boundary of a name."""
    found = pattern.replace("*.", r"(?P<index>\d+)\." if index else r".*\.")
    return found + (r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", found) else "")


def _replacement(target: str) -> str:
    """A target pattern as a replacement of ``re.sub``: its back references stay, other backslashes are characters."""
    parts = re.split(r"\\(\d+)", target)
    return "".join(rf"\g<{part}>" if i % 2 else part.replace("\\", r"\\") for i, part in enumerate(parts))


def _within(entry: Any) -> str:
    """How names begin that this entry is for; a submodel's entries are for names under it alone."""
    if entry.scope_prefix is None:
        return ""
    base = rf"(?:{re.escape(entry.base_model_prefix)}\.)?" if entry.base_model_prefix else ""
    scope = rf"{re.escape(entry.scope_prefix)}\." if entry.scope_prefix else ""
    return base + scope


# Converters


@dataclass(frozen=True, slots=True)
class _Stream:
    """What an operation has made: the target it is on the way to, and the pattern of its present name."""

    target: str
    pattern: str


def _converter(entry: Any, config: Any) -> Chain:
    sources, targets = entry.source_patterns, entry.target_patterns
    if any("\\" in target for target in targets) or any(source.count("*.") > 1 for source in sources):
        raise _unknown("a pattern", entry)
    steps, streams, operations = _begin(entry, sources, targets)
    for operation in operations:
        compile_operation = _OPERATIONS.get(type(operation).__name__)
        if compile_operation is None:
            raise _unknown(type(operation).__name__, entry)
        more, streams = compile_operation(operation, streams, targets, config, entry)
        steps += more
    if len(streams) != len(targets):
        raise _unknown(", ".join(type(operation).__name__ for operation in entry.operations), entry)
    steps.append(Rename(rf"{_MARK}\d+", ""))
    return Chain(tuple(_source(source) for source in sources), tuple(steps), _within(entry))


def _begin(entry: Any, sources: list[str], targets: list[str]) -> tuple[list[Transform], list[_Stream], Sequence[Any]]:
    """The first operation sees the names on disk: it collects what a glob matches, or there is one tensor."""
    first, name = entry.operations[0], type(entry.operations[0]).__name__
    if name == "MergeModulelist":
        if not all("*." in source for source in sources):
            raise _unknown(name, entry)
        streams = [_stream(targets[0], i) for i in range(len(sources))]
        stacks: list[Transform] = [
            Stack(_source(source, index=True), _marked(targets[0], i), first.dim) for i, source in enumerate(sources)
        ]
        return stacks, streams, entry.operations[1:]
    if name == "Concatenate":
        patterns = tuple(_source(source, index="*." in source) for source in sources)
        return [Concat(patterns, _marked(targets[0], 0), first.dim)], [_stream(targets[0], 0)], entry.operations[1:]
    if len(sources) > 1 or "*." in sources[0]:
        raise _unknown(name, entry)
    rename = Rename(_source(sources[0]), _marked(targets[0], 0), 1)
    return [rename], [_stream(targets[0], 0)], entry.operations


def _marked(target: str, number: int) -> str:
    return f"{target}{_MARK}{number}"


def _stream(target: str, number: int) -> _Stream:
    return _Stream(target, re.escape(_marked(target, number)) + r"(?!\d)")


_Compiled = tuple[list[Transform], list[_Stream]]


def _concatenate(operation: Any, streams: list[_Stream], targets: list[str], config: Any, entry: Any) -> _Compiled:
    # The first of the streams already has the name of the result; a number of its own keeps the two apart.
    number = len(streams)
    joined = Concat(tuple(stream.pattern for stream in streams), _marked(targets[0], number), operation.dim)
    return [joined], [_stream(targets[0], number)]


def _chunk(operation: Any, streams: list[_Stream], targets: list[str], config: Any, entry: Any) -> _Compiled:
    if len(streams) > 1 or operation.num_shards_attribute is not None:
        raise _unknown("Chunk", entry)
    names = tuple(_marked(target, i) for i, target in enumerate(targets))
    return [Split(streams[0].pattern, names, "equal", operation.dim)], [
        _stream(target, i) for i, target in enumerate(targets)
    ]


def _split(operation: Any, streams: list[_Stream], targets: list[str], config: Any, entry: Any) -> _Compiled:
    if len(streams) > 1 or operation is not entry.operations[-1]:
        raise _unknown("Split", entry)
    cut = Split(streams[0].pattern, tuple(targets), "model", operation.dim)
    return [cut], [_Stream(target, re.escape(target)) for target in targets]


def _transpose(operation: Any, streams: list[_Stream], targets: list[str], config: Any, entry: Any) -> _Compiled:
    dims = (operation.dim0, operation.dim1)
    if not operation.check_dims:
        return [Transpose(stream.pattern, dims) for stream in streams], streams
    if len(streams) > 1 or len(targets) > 1:
        raise _unknown("Transpose", entry)
    named, plain = Rename(streams[0].pattern, targets[0]), re.escape(targets[0])
    return [named, Transpose(plain, dims, unless_fits=True)], [_Stream(targets[0], plain)]


def _interleave(operation: Any, streams: list[_Stream], targets: list[str], config: Any, entry: Any) -> _Compiled:
    shape = (2, -1) if operation.inverse else (-1, 2)
    return [Reshape(stream.pattern, shape, (1, 0), dim=operation.dim) for stream in streams], streams


def _permute_for_rope(operation: Any, streams: list[_Stream], targets: list[str], config: Any, entry: Any) -> _Compiled:
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    shape = (heads, 2, -1) if operation.inverse else (heads, -1, 2)
    names = operation.permute_layer_names
    chosen = [stream for stream in streams if names is None or any(name in stream.target for name in names)]
    return [Reshape(stream.pattern, shape, (0, 2, 1), dim=0) for stream in chosen], streams


_OPERATIONS: dict[str, Callable[[Any, list[_Stream], list[str], Any, Any], _Compiled]] = {
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
}


def _unknown(what: str, entry: Any) -> BackendError:
    sources, targets = (", ".join(getattr(entry, f"{side}_patterns", ())) for side in ("source", "target"))
    return BackendError(
        f"Transformers converts checkpoints of this model by {what} ({sources} to {targets}), which is not known here."
    )
