"""Try one architecture: build it tiny, run it, compare it with Transformers' own forward.

Legend: T tokens, H hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelbay.errors import ModelbayError, one_line_with_type
from modelbay_testing.logits import engine_logits, worst_difference
from modelbay_testing.matrix.cases import AUDIO_TEXT, IMAGE_TEXT, Case
from modelbay_testing.matrix.reference import case_config, forward_rows, randomize, reference_model
from modelbay_testing.tiny import tiny_tokenizer
from modelbay_testing.tiny_configs import FIRST_MEDIA_ID

#: Two results match if they differ by at most this, or by this part of ten times the largest reference value.
TOLERANCE = 1e-4
_LENGTHS = (1, 5, 33, 90)
_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """``outcome``: matches, refused, differs, or fails; ``difference`` is the largest one, absolute; ``example``: a
    well-known checkpoint; ``note``: what a match is limited to."""

    task: str
    model_type: str
    architecture: str
    outcome: str
    reason: str = ""
    difference: float | None = None
    example: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def attempt(case: Case, folder: Path) -> Outcome:
    """Try a case in ``folder`` (emptied by the caller); never raises for what a model does."""
    if case.task in (IMAGE_TEXT, AUDIO_TEXT):
        from modelbay_testing.matrix.media_attempt import attempt_media

        return attempt_media(case, folder)
    facts = (case.task, case.model_type, case.architecture)
    try:
        config, tiny = case_config(case)
        config.architectures = [case.architecture]
        config.save_pretrained(folder)
        refused = refusal(folder, case)
        if refused is not None:
            return Outcome(*facts, "refused", refused)
        if not tiny:
            return Outcome(*facts, "fails", "it builds, and no tiny copy of it can be made to compare it with")
        difference, scale = _compare(case, config, folder)
        return judged(facts, difference, scale)
    except Exception as error:
        return Outcome(*facts, "fails", said_by(error))


def judged(facts: tuple[str, str, str], difference: float, scale: float, note: str = "") -> Outcome:
    """What a comparison makes of a case. ``scale``: the largest absolute value of the reference."""
    outcome, reason = ("matches", "") if close(difference, scale) else ("differs", f"values up to {scale:.3g}")
    return Outcome(*facts, outcome, reason, float(f"{difference:.0e}"), note=note)


def close(difference: float, scale: float) -> bool:
    """Whether values up to ``scale`` that differ so much are the same in float32."""
    return difference <= TOLERANCE * max(1.0, scale / 10)


def said_by(error: Exception) -> str:
    """The type and message of what a case raised; of our own errors without the hint."""
    if isinstance(error, ModelbayError):
        return f"{type(error).__name__}: {error.message}"
    return one_line_with_type(error)[:320]


def refusal(folder: Path, case: Case) -> str | None:
    """Why the model is refused before any weight is loaded; None if it is not. There are no weights in ``folder``."""
    from modelbay.resolve import resolve
    from modelbay_runtime.build import build_model

    try:
        build_model(resolve(str(folder), **arguments(case)))
    except ModelbayError as error:
        # Of a refusal by every backend, what this one says.
        said = re.search(r": transformers: (.*?)(?:; \w+: |$)", error.message)
        return said[1] if said else error.message
    return None


def arguments(case: Case) -> dict[str, Any]:
    """How a case's checkpoint is loaded."""
    runner = "generate" if case.task == "generate" else "pooling"
    return {
        "dtype": "float32", "model_impl": "transformers", "runner": runner, "max_model_len": 256,
        "kv_cache_memory_bytes": 1 << 24, "max_num_batched_tokens": 256 if case.task == "embed" else 64,
    }  # fmt: skip


def _compare(case: Case, config: Any, folder: Path) -> tuple[float, float]:
    """The largest difference, and the largest absolute value of the reference."""
    import torch

    from modelbay import LLM, PoolingParams

    reference = reference_model(case, config)
    randomize(reference)
    reference.save_pretrained(folder)
    config.save_pretrained(folder)  # as a composite model has it, where the class is built from its text config alone
    tiny_tokenizer(folder)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, FIRST_MEDIA_ID, (n,), generator=generator).tolist() for n in _LENGTHS]
    with LLM(str(folder), **arguments(case)) as llm:
        if case.task == "generate":
            runs = engine_logits(llm, prompts, _OUTPUT_TOKENS)
            tokens, found = [ids[:-1] for ids, _ in runs], [logits for _, logits in runs]
        elif case.task == "classify":
            params = PoolingParams(use_activation=False)
            classes = llm.classify([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            tokens, found = prompts, [torch.tensor(output.probs) for output in classes]
        else:
            outputs = llm.encode([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
            tokens, found = prompts, [output.hidden_states.float().cpu() for output in outputs]
    expected = forward_rows(reference, tokens)
    worst = worst_difference(found, expected)
    return worst, max(rows.abs().max().item() for rows in expected)
