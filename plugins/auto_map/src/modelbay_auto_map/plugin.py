"""What modelbay-auto-map adds: the backend `auto_map`. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import BackendSpec


@hookimpl
def register_modeling_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="auto_map",
            target="modelbay_auto_map.backend:AutoMapBackend",
            order=60,
            summary="model code that the repository brings (auto_map), trusted, on the runtime's attention and cache",
            extends="transformers",
        )
    ]
