"""Historical repairs, each named in the trace: those that plugins register, then RoPE and dtype spelling."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelbay.config.origins import Origins
from modelbay.config.text import inner_dict, text_path
from modelbay.errors import ConfigError, ModelbayError
from modelbay.rope import canonical_config
from modelbay.specs import ConfigPatch, load_target

if TYPE_CHECKING:
    from modelbay.plugins import Plugins
    from modelbay.trace import Trace


def apply_patches(raw: Mapping[str, Any], plugins: Plugins, origins: Origins, trace: Trace) -> dict[str, Any]:
    """A patched copy. Patches see the whole dict, and the nested text config as a dict of its own.

    ``origins`` follows what they change.
    """
    patched = copy.deepcopy(dict(raw))
    levels: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), patched)]
    path = text_path(patched)
    if path:
        levels.append((path, inner_dict(patched, path)))
    for name in plugins.names("config_patches"):
        owned = plugins.get("config_patches", name)
        assert owned is not None, "a name that is listed has an owner"
        for where, level in levels:
            _apply(owned.value, str(owned.owner), where, level, origins, trace)
    for where, level in levels:
        before = copy.deepcopy(level)
        for done in canonical_config(level):
            trace.decide("config", "patch rope-spelling", done, "modelbay")
        origins.normalise(before, level, where)
        for done in _plain_dtypes(level):
            trace.decide("config", "patch dtype-spelling", done, "modelbay")
    return patched


def _plain_dtypes(level: dict[str, Any]) -> list[str]:
    """``"torch.bfloat16"`` as ``"bfloat16"``, which is how every class reads it."""
    done = []
    for key in ("dtype", "torch_dtype"):
        value = level.get(key)
        if isinstance(value, str) and value.startswith("torch."):
            level[key] = value.removeprefix("torch.")
            done.append(f"{key} {value} as {level[key]}")
    return done


def _apply(
    patch: ConfigPatch, owner: str, where: tuple[str, ...], level: dict[str, Any], origins: Origins, trace: Trace
) -> None:
    if patch.model_types and level.get("model_type") not in patch.model_types:
        return
    before = copy.deepcopy(level)
    try:
        done = load_target(patch.target)(level)
    except ModelbayError:
        raise
    except Exception as error:
        raise ConfigError(f"config patch {patch.name!r} of {owner} failed: {type(error).__name__}: {error}") from error
    origins.patch(before, level, where, f"patch {patch.name} of {owner}")
    if done:
        trace.decide("config", f"patch {patch.name}", done, owner)
