"""Decisions, and the trace that collects them while a model walks down the hallway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import logging

#: The stages of the hallway in the order in which they run.
STAGES = (
    "plugins",
    "source",
    "config",
    "tokenizer",
    "architectures",
    "backends",
    "build",
    "plan",
    "kernels",
    "weights",
    "engine",
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """An option that was not taken, and the reason."""

    option: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: which question, which answer, where the answer came from, what was rejected.

    ``answer`` is JSON-serialisable. ``level`` is "warning" for what a user should look at.
    """

    stage: str
    question: str
    answer: Any
    source: str
    rejected: tuple[Rejected, ...] = ()
    level: Literal["info", "warning"] = "info"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Trace:
    """The decisions of one run, in the order in which they were taken."""

    decisions: list[Decision] = field(default_factory=list)

    def decide(
        self,
        stage: str,
        question: str,
        answer: Any,
        source: str,
        *,
        rejected: tuple[Rejected, ...] = (),
        level: Literal["info", "warning"] = "info",
    ) -> None:
        """Append one decision. ``stage`` is one of `STAGES`."""
        assert stage in STAGES, f"unknown stage {stage!r}"
        self.decisions.append(Decision(stage, question, answer, source, rejected, level))

    def warn(self, stage: str, question: str, answer: Any, source: str) -> None:
        """Append a decision that a user should look at."""
        self.decide(stage, question, answer, source, level="warning")

    def warnings(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.level == "warning"]

    def log_warnings(self, stage: str, logger: logging.Logger) -> None:
        """Say the warnings of one stage to whoever reads no trace."""
        for decision in self.warnings():
            if decision.stage == stage:
                logger.warning("%s: %s (%s)", decision.question, decision.answer, decision.source)

    def find(self, question: str, stage: str | None = None) -> Decision | None:
        """The last decision on ``question``, or None."""
        for decision in reversed(self.decisions):
            if decision.question == question and stage in (None, decision.stage):
                return decision
        return None

    def argument(self, name: str) -> str:
        """The source of what an engine argument decides: the argument itself, or whoever filled it in.

        Whoever fills in an argument that was not given appends a decision on "argument NAME" first.
        """
        filled = self.find(f"argument {name}")
        return filled.source if filled else f"argument {name}"

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def to_list(self) -> list[dict[str, Any]]:
        return [decision.to_dict() for decision in self.decisions]
