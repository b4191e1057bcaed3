"""Try one architecture: build it tiny, run it, compare it with Transformers' own forward.

Legend: T tokens, H hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelbay_testing.logits import engine_logits, worst_difference
from modelbay_testing.matrix.cases import AUDIO_TEXT, IMAGE_TEXT, Case
from modelbay_testing.tiny import tiny_tokenizer
from modelbay_testing.tiny_configs import FIRST_MEDIA_ID, tiny_config

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
    from modelbay.errors import ModelbayError, one_line_with_type

    if case.task in (IMAGE_TEXT, AUDIO_TEXT):
        from modelbay_testing.matrix.media_attempt import attempt_media

        return attempt_media(case, folder)
    facts = (case.task, case.model_type, case.architecture)
    try:
        config, tiny = _config(case)
        config.architectures = [case.architecture]
        config.save_pretrained(folder)
        refused = refusal(folder, case)
        if refused is not None:
            return Outcome(*facts, "refused", refused)
        if not tiny:
            return Outcome(*facts, "fails", "it builds, and no tiny copy of it can be made to compare it with")
        difference, scale = _compare(case, config, folder)
        matches = difference <= TOLERANCE * max(1.0, scale / 10)
        outcome, reason = ("matches", "") if matches else ("differs", f"values up to {scale:.3g}")
        return Outcome(*facts, outcome, reason, float(f"{difference:.0e}"))
    except ModelbayError as error:
        return Outcome(*facts, "fails", f"{type(error).__name__}: {error.message}")
    except Exception as error:
        return Outcome(*facts, "fails", f"{one_line_with_type(error)[:320]}")


def _config(case: Case) -> tuple[Any, bool]:
    """The tiny config (the class's own default where its sizes cannot be made small by rule), and whether Transformers'
    own model runs with it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = tiny_config(case.model_type, **case.overrides)
    except Exception:
        return CONFIG_MAPPING[case.model_type](), False
    try:
        _reference(case, config)
    except Exception:
        return config, False
    return config, True


def refusal(folder: Path, case: Case) -> str | None:
    """Why the model is refused before any weight is loaded; None if it is not. There are no weights in ``folder``."""
    from modelbay.errors import ModelbayError
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

    reference = _reference(case, config)
    _randomize(reference)
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
    expected = _forward(reference, tokens)
    worst = worst_difference(found, expected)
    return worst, max(rows.abs().max().item() for rows in expected)


def _reference(case: Case, config: Any) -> Any:
    """Transformers' own model, small enough, and able to run."""
    import copy

    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cls = getattr(transformers, case.architecture)
        config = copy.deepcopy(config)
        own = config if isinstance(config, cls.config_class) else config.get_text_config()
        model = cls._from_config(own, dtype=torch.float32).eval()
    _forward(model, [[5, 6, 7]])
    return model


def _forward(model: Any, sequences: Sequence[Sequence[int]]) -> list[Any]:
    """Logits [T, V] (of a classifier [C]) or hidden states [T, H] of whole sequences, one at a time."""
    import torch

    rows = []
    with torch.inference_mode():
        for ids in sequences:
            output = model(input_ids=torch.tensor([list(ids)]))
            rows.append((output.logits if hasattr(output, "logits") else output[0])[0].float())
    return rows


def _randomize(model: Any) -> None:
    """Every parameter random, norms around one, so that nothing forgotten goes unseen; routing biases too."""
    import torch

    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and "norm" in name.lower()
            std = 0.1 if norm else 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if norm else 0.0, std, generator=generator)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point() and not buffer.any():
                buffer.normal_(0.0, 0.1, generator=generator)
