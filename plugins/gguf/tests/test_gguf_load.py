"""The whole way: a file, through core's config and runtime's loader, into a module that computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from modelbay.args import EngineArgs
from modelbay.config import load_config
from modelbay.errors import WeightsError
from modelbay.plugins import load_plugins
from modelbay.source import find_files
from modelbay.trace import Trace
from modelbay_gguf import plugin
from modelbay_gguf.archs import ARCHS


def _resolution(path: Path) -> Any:
    trace, args, plugins = Trace(), EngineArgs(model=str(path)), load_plugins([plugin])
    files = find_files(str(path), file_suffixes=(".gguf",), trace=trace)
    config = load_config(files, plugins, args, trace)
    return SimpleNamespace(args=args, files=files, plugins=plugins, config=config, arch=None, trace=trace)


def _load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Transformers' module, made from the file's config and filled from its tensors."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    loading = pytest.importorskip("modelbay_runtime.loading")
    resolution = _resolution(path)
    raw = {key: value for key, value in resolution.config.raw.items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[raw["model_type"]](**raw), dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    report = loading.load_weights(model, resolution, device="cpu", dtype=dtype)
    return model.eval(), report


@pytest.mark.parametrize("arch", sorted(ARCHS))
@torch.inference_mode()
def test_w4_logits_are_those_of_the_model_that_was_written(arch: str, write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf(arch)
    model, report = _load(tiny.path)
    ids = torch.arange(3, 43).view(1, -1)
    torch.testing.assert_close(model(ids).logits, tiny.model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    assert report.format == "gguf"


def test_w4_an_unknown_tensor_is_refused_by_name(write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf(tensors={"blk.0.ffn_gate_exps.weight": torch.zeros(8, 32).numpy()})
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        _load(tiny.path)


def test_w7_quantised_tensors_load_into_the_target_dtype(write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf("qwen2", Q.Q4_1)
    model, _ = _load(tiny.path, torch.bfloat16)
    for name, value in tiny.model.state_dict().items():
        assert model.state_dict()[name].dtype == torch.bfloat16
        assert (model.state_dict()[name].float() - value).abs().max() < 0.15, name  # half a step of 16, and bfloat16
