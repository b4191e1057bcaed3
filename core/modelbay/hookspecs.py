"""Every hook on one screen. A plugin is a module with some of these functions, marked with `modelbay.hookimpl`.

All return data: frozen records from `modelbay.specs`, code named as "package.module:object". The long reference,
with an example for each, is docs/reference/hooks.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from modelbay.specs import (
    ArchSpec,
    AttentionKindSpec,
    BackendSpec,
    CommandSpec,
    ConfigClassSpec,
    ConfigPatch,
    KernelSpec,
    LoadFormatSpec,
    QuantizationSpec,
    TokenizerModeSpec,
)

PROJECT = "modelbay"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_architectures() -> Iterable[ArchSpec]:
    """Add model architectures, by the names that configs carry in `architectures`."""
    raise NotImplementedError


@hookspec
def register_config_classes() -> Iterable[ConfigClassSpec]:
    """Add config classes for model types, preferred over Transformers' and over remote code."""
    raise NotImplementedError


@hookspec
def register_config_patches() -> Iterable[ConfigPatch]:
    """Add named repairs of configs as they were once written."""
    raise NotImplementedError


@hookspec
def register_tokenizer_modes() -> Iterable[TokenizerModeSpec]:
    """Add values of `tokenizer_mode`."""
    raise NotImplementedError


@hookspec
def register_load_formats() -> Iterable[LoadFormatSpec]:
    """Add checkpoint formats, values of `load_format`."""
    raise NotImplementedError


@hookspec
def register_modeling_backends() -> Iterable[BackendSpec]:
    """Add ways to turn a resolved architecture into a module, values of `model_impl`."""
    raise NotImplementedError


@hookspec
def register_attention_kinds() -> Iterable[AttentionKindSpec]:
    """Add kinds of attention, each with the cache it needs and a torch reference."""
    raise NotImplementedError


@hookspec
def register_kernels() -> Iterable[KernelSpec]:
    """Add implementations of ops, values of `kernels` and `attention_backend`."""
    raise NotImplementedError


@hookspec
def register_quantizations() -> Iterable[QuantizationSpec]:
    """Add values of `quantization_config.quant_method` that can be served."""
    raise NotImplementedError


@hookspec
def register_commands() -> Iterable[CommandSpec]:
    """Add subcommands of `modelbay`."""
    raise NotImplementedError
