"""How large a model may be to be built by Transformers' classes: one module for each part, and each part is run.

What is built takes time and memory for every module long before its weights are looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelbay.config.names import LAYERS, names_of
from modelbay.errors import BackendError

#: A layer costs hundredths of a second; the deepest models have some hundred.
MAX_LAYERS = 512
#: Where each expert of each layer is a module: several times what the largest models have.
MAX_EXPERT_MODULES = 65_536


def check_extent(config: Any) -> None:
    """Refuse what would not be built in any reasonable time, before it is begun.

    Args:
        config: of Transformers, with the configs of towers inside.

    Raises:
        BackendError: naming the key and the limit.
    """
    for where, part in _parts(config):
        layers = {key: _count(part, key) for key in LAYERS}
        for key, count in layers.items():
            if count > MAX_LAYERS:
                raise BackendError(
                    f"the config's {where}{key} is {count:,}, and Transformers' classes are built with at most "
                    f"{MAX_LAYERS} layers."
                )
        most = max(layers.values())
        for key in names_of("num_experts"):
            experts = _count(part, key)
            if most * experts > MAX_EXPERT_MODULES:
                raise BackendError(
                    f"the config's {where}{key} is {experts:,} in {most} layers, and Transformers' classes are "
                    f"built with at most {MAX_EXPERT_MODULES:,} experts in all."
                )


def _parts(config: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    yield where, config
    for name in getattr(type(config), "sub_configs", {}) if depth < 4 else ():
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _parts(inner, f"{where}{name}.", depth + 1)


def _count(config: Any, key: str) -> int:
    try:
        value = getattr(config, key, None)
    except Exception:  # a class that has one for each layer refuses to say
        return 0
    return value if isinstance(value, int) else 0
