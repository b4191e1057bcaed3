"""What modelbay-gguf adds to Modelbay. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import LoadFormatSpec, QuantizationSpec, TokenizerModeSpec


@hookimpl
def register_load_formats() -> list[LoadFormatSpec]:
    return [
        LoadFormatSpec(
            name="gguf",
            target="modelbay_gguf.weights:Gguf",
            suffixes=(".gguf",),
            auto=30,
            config="modelbay_gguf.config:stored_config",
            tokenizer_mode="gguf",
            transforms="modelbay_gguf.names:transforms",
        )
    ]


@hookimpl
def register_tokenizer_modes() -> list[TokenizerModeSpec]:
    return [
        TokenizerModeSpec(
            name="gguf", target="modelbay_gguf.tokenizer:load", summary="the tokenizer inside a .gguf file"
        )
    ]


@hookimpl
def register_quantizations() -> list[QuantizationSpec]:
    return [QuantizationSpec(method="gguf", summary="dequantised while streaming")]
