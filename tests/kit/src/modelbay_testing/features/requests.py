"""How each feature is asked for, where it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelbay import LLM, SamplingParams
from modelbay_testing.features.checkpoints import edit_config, gguf_header
from modelbay_testing.features.models import Model

Ask = Callable[[Any, Path], None]


def _generate(**params: Any) -> Ask:
    def ask(model: Model, folder: Path) -> None:
        with model.open() as llm:
            llm.generate(model.prompts[0], SamplingParams(**params), use_tqdm=False)

    return ask


def _stream(model: Model, folder: Path) -> None:
    with model.open() as llm:
        next(llm.stream(model.prompts[0]))


def _load(**options: Any) -> Ask:
    def ask(model: Model, folder: Path) -> None:
        model.load(**options).close()

    return ask


def _another_method(model: Model, folder: Path) -> None:
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4})
    LLM(str(folder), **model.options).close()


def _gguf_of(architectures: Mapping[str, str]) -> Ask:
    def ask(model: Model, folder: Path) -> None:
        [architecture] = [name for kind, name in architectures.items() if kind in type(model.reference).__name__]
        LLM(str(gguf_header(folder / "model.gguf", architecture)), dtype="float32").close()

    return ask


#: Feature -> what asks for it: given the model, and an empty folder.
REQUESTS: Mapping[str, Ask] = {
    "logprobs": _generate(logprobs=1),
    "prompt logprobs": _generate(prompt_logprobs=1),
    "stop strings": _generate(stop=["a"]),
    "n > 1": _generate(n=2, temperature=1.0),
    "streaming": _stream,
    "pipeline parallel": _load(pipeline_parallel_size=2),
    "expert parallel": _load(tensor_parallel_size=2, enable_expert_parallel=True),
    "quantization: GGUF": _gguf_of({"Bert": "bert", "Llava": "clip"}),
    "quantization: others": _another_method,
    "structured output": _generate(structured_outputs={"choice": ["yes", "no"]}),
    "LoRA": _load(enable_lora=True),
    "speculation": _load(speculative_config={"method": "mtp", "num_speculative_tokens": 1}),
}
