"""Parallel plans as data: patterns name whole names, styles are known, stages are direct children (X5, X6)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from modelbay.errors import ConfigError, UsageError
from modelbay.plans import (
    STYLES,
    check_pp_plan,
    check_tp_plan,
    name_pattern,
    place_children,
    split_stages,
    unmatched,
)

SIDE = (["hidden_states"], ["hidden_states"])
CHILDREN = {"embed": False, "layers": True, "norm": False, "more_layers": True}


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layers.*.self_attn.q_proj", "layers.11.self_attn.q_proj", True),
        ("layers.*.self_attn.q_proj", "model.layers.11.self_attn.q_proj", False),
        ("layers.*.self_attn.q_proj", "layers.11.self_attn.q_proj.weight", False),
        ("layers.*.q_proj", "layers.1.self_attn.q_proj", False),
        ("layers.*", "layers.", False),
        ("*", "norm", True),
        ("*", "layers.0", False),
        ("layers.*.mlp.experts.*.w1", "layers.0.mlp.experts.7.w1", True),
        ("layer.+", "layerss", False),
        ("a.b", "aXb", False),
    ],
)
def test_x5_a_pattern_matches_whole_names_and_a_star_one_level(pattern: str, name: str, matches: bool) -> None:
    assert bool(name_pattern(pattern).fullmatch(name)) is matches
    assert unmatched([pattern], [name]) == ([] if matches else [pattern])


@pytest.mark.parametrize("style", sorted(STYLES))
def test_x5_every_known_style_is_accepted(style: str) -> None:
    check_tp_plan({"layers.*.mlp": style}, "C.plan")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"a.*": "colwise", "b": "colwize"},
            r"C\.plan gives 'b' the unknown style 'colwize'\. Did you mean 'colwise'\?",
        ),
        ({"b": "zebra"}, r"unknown style 'zebra'\. Known: all_reduce, colwise, "),
        ({"b": None}, "unknown style None"),
        ({1: "colwise"}, "gives 1 the unknown"),
        (["colwise"], "must be a dict"),
    ],
)
def test_x5_an_unknown_style_is_named(plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tp_plan(plan, "C.plan")


def test_the_styles_are_those_of_transformers_own_plans() -> None:
    """Whatever the installed Transformers' own plans say is known, so that none of its models is refused for it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    seen: set[str] = set()
    for model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        for attribute in ("base_model_tp_plan", "base_model_ep_plan"):
            seen |= set((getattr(config_class, attribute, None) or {}).values())
    assert {"colwise", "rowwise", "packed_colwise"} <= seen <= set(STYLES)


def test_x6_a_plan_splits_one_list_of_direct_children() -> None:
    check_pp_plan({"embed": (["input_ids"], ["inputs_embeds"]), "layers": SIDE, "norm": SIDE}, CHILDREN, "C.plan")
    check_pp_plan({"layers": [["x", "mask"], ["x"]]}, CHILDREN, "C.plan")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"layers": SIDE, "layers.0": SIDE},
            r"C\.plan names 'layers\.0', .* \(children: embed, layers, norm, more_layers\)",
        ),
        ({"model": SIDE}, "names 'model', which is no direct child"),
        ({"embed": SIDE, "norm": SIDE}, r"exactly one nn\.ModuleList, .*; it names none"),
        ({"layers": SIDE, "more_layers": SIDE}, "it names layers, more_layers"),
        ({"layers": ["x"]}, "must be a pair of lists"),
        ({"layers": ("hidden_states", "hidden_states")}, "must be a pair of lists"),
        ({"layers": ([1], [2])}, "must be a pair of lists"),
        ([], "must be a dict"),
    ],
)
def test_x6_a_plan_that_does_not_fit_is_refused(plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pp_plan(plan, CHILDREN, "C.plan")


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (4, 4, [1, 1, 1, 1]),
        (5, 4, [1, 2, 1, 1]),
        (30, 4, [7, 8, 8, 7]),
        (61, 4, [15, 16, 15, 15]),
        (7, 4, [2, 2, 2, 1]),
        (8, 3, [3, 3, 2]),
        (7, 3, [2, 3, 2]),
        (3, 2, [2, 1]),
        (9, 1, [9]),
    ],
)
def test_x6_remainder_layers_go_to_the_middle_stages(layers: int, stages: int, sizes: list[int]) -> None:
    ranges = split_stages(layers, stages)
    assert [len(part) for part in ranges] == sizes
    assert [layer for part in ranges for layer in part] == list(range(layers))


def test_d1_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="3 layers do not divide into pipeline_parallel_size = 4"):
        split_stages(3, 4)


def test_x6_children_live_where_the_plan_names_them() -> None:
    children = {"embed": False, "rotary_emb": False, "layers": True, "norm": False, "project": False}
    plan = {"embed": SIDE, "layers": SIDE, "norm": SIDE, "project": SIDE}
    assert place_children(plan, children) == {
        "embed": "first", "rotary_emb": "every", "layers": "split", "norm": "last", "project": "last",
    }  # fmt: skip


def test_plans_are_light() -> None:
    code = "import sys, modelbay.plans; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
