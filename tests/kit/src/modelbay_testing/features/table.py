"""The table: for each feature and each kind of model, whether it works, is refused (saying so), or changes nothing.

`modelbay_testing.features.checks` has the test of every feature; `page` renders docs/features.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelbay import errors

COLUMNS: Mapping[str, str] = {
    "native": "Native",
    "transformers": "Transformers backend",
    "encoder": "Encoder-only",
    "media": "Multimodal",
}


@dataclass(frozen=True, slots=True)
class Works:
    """Args:
    of: which checkpoint shows it, where the column's own cannot (a key of `models.VARIANTS`).
    note: what to know about it.
    deep: the test takes longer, and a faster cell of the row is run every time.
    """

    of: str = ""
    note: str = ""
    deep: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Asking for it is an error of this kind whose message has these words. ``note``: what is true besides."""

    says: str
    error: type[errors.ModelbayError] = errors.UsageError
    note: str = ""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """There is nothing that it could change; asking for it gives the same as not asking."""

    why: str


Cell = Works | Refused | NoEffect


@dataclass(frozen=True, slots=True)
class Row:
    """Args:
    feature: its name; what a test is called after.
    asked: how it is asked for.
    shown: what the test of a cell that works compares.
    """

    feature: str
    asked: str
    shown: str
    native: Cell
    transformers: Cell
    encoder: Cell
    media: Cell

    def cell(self, column: str) -> Cell:
        found: Cell = getattr(self, column)
        return found


_NO_TEXT = Refused("which generates no text")
_NO_EXPERTS = Refused("enable_expert_parallel: the model has no experts")
_NO_DRAFT = Refused("has no layer to draft with")
_ONE_STAGE = Refused("reads more than text, and is not run in stages", errors.BackendError)
_LORA = Refused("LoRA adapters are not served")
_OTHER_METHODS = Refused(
    "quantization_config.quant_method is 'awq', which no installed plugin offers", errors.ConfigError
)

ROWS: tuple[Row, ...] = (
    Row(
        "chunked prefill",
        "`enable_chunked_prefill` (the default), `max_num_batched_tokens`",
        "prompts that take several steps, cut within images too: the tokens that Transformers generates",
        Works(), Works(), NoEffect("every token sees all others, so a prompt is computed whole"), Works(),
    ),
    Row(
        "prefix cache",
        "`enable_prefix_caching` (the default)",
        "the same prompts again, of which a part comes from the cache: the tokens that Transformers generates",
        Works(), Works(), NoEffect("nothing is kept per token"),
        Works(note="blocks are shared where the images at their places are equal too"),
    ),
    Row(
        "preemption",
        "a KV cache that is too small for all requests (`kv_cache_memory_bytes`)",
        "requests that lose their blocks and start again: the tokens that Transformers generates",
        Works(), Works(), NoEffect("there is no KV cache to run out of"), Works(),
    ),
    Row(
        "logprobs",
        "`SamplingParams(logprobs=…)`",
        "the log-probability of every output token and of the likeliest ones, within 1e-4 of Transformers'",
        Works(), Works(), _NO_TEXT, Works(),
    ),
    Row(
        "prompt logprobs",
        "`SamplingParams(prompt_logprobs=…)`",
        "the same of every token of the prompt, images included",
        Works(), Works(), _NO_TEXT, Works(),
    ),
    Row(
        "stop strings",
        "`SamplingParams(stop=…)`",
        "the text of Transformers' tokens up to the string, and the reason",
        Works(), Works(), _NO_TEXT, Works(),
    ),
    Row(
        "n > 1",
        "`SamplingParams(n=…)`",
        "with `top_k=1` all equal Transformers' greedy one; drawn ones differ, and repeat with a seed",
        Works(), Works(), _NO_TEXT, Works(),
    ),
    Row(
        "streaming",
        "`LLM.stream`",
        "each output is longer than the one before and begins with it; the last has Transformers' tokens",
        Works(), Works(), _NO_TEXT, Works(),
    ),
    Row(
        "tensor parallel",
        "`tensor_parallel_size`",
        "two processes share every layer: what Transformers gives",
        Works(), Works(deep=True), Works(deep=True), Works(deep=True),
    ),
    Row(
        "pipeline parallel",
        "`pipeline_parallel_size`",
        "two processes with a part of the layers each: what Transformers gives",
        Works(deep=True), Works(), Works(deep=True), _ONE_STAGE,
    ),
    Row(
        "data parallel",
        "`data_parallel_size`",
        "two processes with a share of the requests each: what Transformers gives",
        Works(deep=True), Works(deep=True), Works(), Works(deep=True),
    ),
    Row(
        "expert parallel",
        "`enable_expert_parallel`",
        "two processes with half of the experts each: what Transformers gives",
        Works(of="deepseek", deep=True), Works(), _NO_EXPERTS,
        Works(of="media with experts", deep=True),
    ),
    Row(
        "quantization: fp8",
        "a checkpoint with blocks of e4m3 and their scales; `quantization=\"fp8\"` keeps the weights in 8 bits",
        "what Transformers gives with the dequantised weights",
        Works(of="fp8"), Works(of="fp8"), Works(of="fp8"), Works(of="fp8"),
    ),
    Row(
        "quantization: GGUF",
        "a `.gguf` file",
        "SmolLM2-135M from a file of Q4_1 blocks: the tokens that Transformers generates with the dequantised weights",
        Works(of="gguf", note="the architectures that `modelbay-gguf` lists"), Works(of="gguf", deep=True),
        Refused("architecture 'bert'", errors.ConfigError), Refused("architecture 'clip'", errors.ConfigError),
    ),
    Row(
        "quantization: others",
        "a checkpoint whose `quant_method` is another one (AWQ, GPTQ, …)",
        "",
        _OTHER_METHODS, _OTHER_METHODS, _OTHER_METHODS, _OTHER_METHODS,
    ),
    Row(
        "structured output",
        "`SamplingParams(structured_outputs=…)`",
        "the text is what an expression allows; of a list, the text that Transformers' logits lead to step by step",
        Works(), Works(), _NO_TEXT, Works(),
    ),
    Row("LoRA", "`enable_lora`, `lora_request` of vLLM", "", _LORA, _LORA, _LORA, _LORA),
    Row(
        "speculation",
        "`speculative_config`",
        "a layer of the model guesses a token, which is computed along: the tokens that Transformers generates",
        Works(of="deepseek with a draft layer", note="DeepSeek's multi-token prediction; refused by name for others"),
        _NO_DRAFT, _NO_DRAFT, _NO_DRAFT,
    ),
)  # fmt: skip
