"""How a config of this family says that experts are chosen."""

from __future__ import annotations

from typing import Any

from modelbay.config import ModelConfig
from modelbay.errors import ConfigError
from modelbay_runtime.layers.moe import RoutingSpec

#: ``topk_method`` -> by how many of its best experts a group is ranked; None: there are no groups.
_GROUP_MEMBERS: dict[str, int | None] = {"greedy": None, "group_limited_greedy": 1, "noaux_tc": 2}


def routing_spec(config: ModelConfig) -> RoutingSpec:
    """The config's values as one spec.

    Raises:
        ConfigError: a method that is not known, or numbers that do not go together.
    """
    method = config.get("topk_method", "greedy")
    if method not in _GROUP_MEMBERS:
        raise ConfigError(f"topk_method is {method!r}; known are {', '.join(_GROUP_MEMBERS)}.")
    members, top_k = _GROUP_MEMBERS[method], _required(config, "num_experts_per_tok")
    renormalise = bool(config.get("norm_topk_prob", False)) and top_k > 1
    scale = float(config.get("routed_scaling_factor", 1.0))
    if renormalise and method != "noaux_tc":
        scale = 1.0  # before V3 weights are either made to sum to one or scaled, as the official code has it
    try:
        return RoutingSpec(
            experts=_required(config, "n_routed_experts"),
            top_k=top_k,
            scoring=config.get("scoring_func", "softmax"),
            groups=1 if members is None else _required(config, "n_group"),
            top_groups=1 if members is None else _required(config, "topk_group"),
            group_members=members or 1,
            renormalise=renormalise,
            scale=scale,
        )
    except ConfigError as error:
        names = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "scoring_func")
        said = ", ".join(f"{name} {config.get(name)!r}" for name in names)
        raise ConfigError(f"{error} The config says {said}.") from error


def _required(config: ModelConfig, key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ConfigError(f"the config has experts and no {key}.")
    return value
