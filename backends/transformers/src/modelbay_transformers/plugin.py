"""What modelbay-transformers adds: the backend `transformers`. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import BackendSpec, ConfigPatch


@hookimpl
def register_modeling_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="transformers",
            target="modelbay_transformers.backend:TransformersBackend",
            order=50,
            summary="Transformers' own model code on the runtime's attention and cache",
        )
    ]


@hookimpl
def register_config_patches() -> list[ConfigPatch]:
    target = "modelbay_transformers.config_patches:falcon_heads"
    return [ConfigPatch(name="falcon-heads", target=target, model_types=("falcon",))]
