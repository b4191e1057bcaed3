"""What the core itself registers, through the same hooks as anybody."""

from __future__ import annotations

from modelbay.hookspecs import hookimpl
from modelbay.specs import CommandSpec, LoadFormatSpec, TokenizerModeSpec


@hookimpl
def register_load_formats() -> list[LoadFormatSpec]:
    return [
        LoadFormatSpec(
            name="safetensors", target="modelbay.weights.safetensors:Safetensors", suffixes=(".safetensors",), auto=10
        ),
        LoadFormatSpec(name="pt", target="modelbay.weights.pt:PyTorchBin", suffixes=(".bin", ".pt", ".pth"), auto=20),
        LoadFormatSpec(name="dummy", target="modelbay.weights.dummy:Dummy"),
    ]


@hookimpl
def register_tokenizer_modes() -> list[TokenizerModeSpec]:
    return [
        TokenizerModeSpec(name="hf", target="modelbay.tokenizer:load_hf", summary="what AutoTokenizer loads"),
        TokenizerModeSpec(name="slow", target="modelbay.tokenizer:load_slow", summary="the Python tokenizer"),
        TokenizerModeSpec(
            name="fastokens", target="modelbay.tokenizer:load_fastokens", summary="BPE by the Rust package fastokens"
        ),
    ]


@hookimpl
def register_commands() -> list[CommandSpec]:
    return [
        CommandSpec(name="list-archs", target="modelbay.cli.list_archs:command", summary="List architectures."),
        CommandSpec(name="list-plugins", target="modelbay.cli.list_plugins:command", summary="List plugins."),
        CommandSpec(
            name="explain", target="modelbay.cli.explain:command", summary="Explain what would run, without weights."
        ),
        CommandSpec(name="lock", target="modelbay.cli.lock:command", summary="Write down all that a run is made of."),
        CommandSpec(
            name="trust", target="modelbay.cli.trust:command", summary="Show and change which remote code is trusted."
        ),
        CommandSpec(name="version", target="modelbay.cli.version:command", summary="Show versions."),
        CommandSpec(
            name="config", target="modelbay.cli.config:command", summary="Show the settings and where they come from."
        ),
    ]
