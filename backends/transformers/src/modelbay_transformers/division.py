"""How a model is divided over ranks, as far as one run of it on meta needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field

COLWISE, ROWWISE, GATHER, SPLIT_INPUT, WHOLE = (
    "colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicated",
)  # fmt: skip


@dataclass(slots=True)
class Division:
    """How a model is divided over ``size`` ranks.

    Attributes:
        styles: linear -> its style; those that are not named are whole.
        parts: colwise linear -> how many different parts there are, where fewer than ranks (KV heads held several
            times).
        sections: colwise linear -> the sizes of what its output holds one after another, each of which is split.
        parameters: parameter -> the dimension that is split, outside of linears.
        attributes: module -> its attributes that count heads, as they are for one rank.
        opaque: modules that divide themselves: they give hidden states.
    """

    size: int
    styles: dict[str, str] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
