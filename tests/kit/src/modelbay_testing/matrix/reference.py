"""Transformers' own side of the matrix: a tiny config of a case, its model, random parameters, and its forward.

Legend: T tokens, H hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from modelbay_testing.matrix.cases import Case
from modelbay_testing.tiny_configs import tiny_config


def case_config(case: Case) -> tuple[Any, bool]:
    """The tiny config (the class's own default where its sizes cannot be made small by rule), and whether Transformers'
    own model runs with it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = tiny_config(case.model_type, **case.overrides)
    except Exception:
        return CONFIG_MAPPING[case.model_type](), False
    try:
        reference_model(case, config)
    except Exception:
        return config, False
    return config, True


def reference_model(case: Case, config: Any) -> Any:
    """Transformers' own model, small enough, and able to run."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cls = getattr(transformers, case.architecture)
        config = copy.deepcopy(config)
        own = config if isinstance(config, cls.config_class) else config.get_text_config()
        model = cls._from_config(own, dtype=torch.float32).eval()
    forward_rows(model, [[5, 6, 7]])
    return model


def forward_rows(model: Any, sequences: Sequence[Sequence[int]]) -> list[Any]:
    """Logits [T, V] (of a classifier [C]) or hidden states [T, H] of whole sequences, one at a time."""
    rows = []
    with torch.inference_mode():
        for ids in sequences:
            output = model(input_ids=torch.tensor([list(ids)]))
            rows.append((output.logits if hasattr(output, "logits") else output[0])[0].float())
    return rows


def randomize(model: Any) -> None:
    """Every parameter random, norms around one, so that nothing forgotten goes unseen; routing biases too."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and "norm" in name.lower()
            std = 0.1 if norm else 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if norm else 0.0, std, generator=generator)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point() and not buffer.any():
                buffer.normal_(0.0, 0.1, generator=generator)
