"""One small model for each column (and what a column's own cannot show), with what Transformers gives for its prompts.

Legend: P prompt tokens, O output tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from modelbay import LLM, SamplingParams
from modelbay_testing.assets import or_skip, smollm2_dir, smollm2_gguf
from modelbay_testing.features.checkpoints import (
    bert,
    deepseek,
    deepseek_with_draft_layer,
    fp8_and_plain,
    llama,
    llava,
    llava_moe,
    qwen3_moe,
)
from modelbay_testing.media_processors import FIRST

TOLERANCE = 1e-4
OUTPUT_TOKENS = 12
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "A model",
    "Numbers 0 1 2 3 4 5 6 7 8 9 stay apart; words like the, and, of, to, in are found",
    "text comes out",
)
_OPTIONS: Mapping[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "distributed_timeout_seconds": 60,
}  # fmt: skip


class Model:
    """A checkpoint, how it is opened, its prompts, and a comparison of what comes of them with Transformers."""

    prompts: list[Any]
    reference: Any

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, {**_OPTIONS, **options}

    def load(self, **options: Any) -> LLM:
        return LLM(str(self.folder), **{**self.options, **options})

    @contextmanager
    def open(self, **options: Any) -> Iterator[LLM]:
        with self.load(**options) as llm:
            yield llm

    def assert_same(self, llm: LLM, prompts: Sequence[int] | None = None) -> list[Any]:
        """The prompts (all, or these) in one batch: what Transformers gives for each. Returns the outputs."""
        raise NotImplementedError


class Generator(Model):
    """A model that generates."""

    #: Added to the logits of every request, by token: placeholders of images are not generated.
    bias: Mapping[int, float] = {}

    def params(self, **more: Any) -> SamplingParams:
        given = {"temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "logit_bias": dict(self.bias)}
        return SamplingParams(**{**given, **more})

    def logits(self, number: int, output: Sequence[int]) -> torch.Tensor:
        """Transformers' raw ones of prompt ``number`` and what was put out so far, [P + O, V]."""
        raise NotImplementedError

    def prompt_length(self, number: int) -> int:
        raise NotImplementedError

    @functools.cached_property
    def wanted(self) -> list[list[int]]:
        """The likeliest token after each, by Transformers, for every prompt."""
        return [self._greedy(number) for number in range(len(self.prompts))]

    def _greedy(self, number: int) -> list[int]:
        output: list[int] = []
        for _ in range(OUTPUT_TOKENS):
            output.append(int(self.biased(self.logits(number, output)[-1]).argmax()))
        return output

    def biased(self, row: torch.Tensor) -> torch.Tensor:
        """[V]: what is sampled from."""
        row = row.clone()
        for token, amount in self.bias.items():
            row[token] += amount
        return row

    def assert_same(self, llm: LLM, prompts: Sequence[int] | None = None) -> list[Any]:
        numbers = range(len(self.prompts)) if prompts is None else prompts
        outputs = llm.generate([self.prompts[number] for number in numbers], self.params(), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [self.wanted[number] for number in numbers]
        return outputs


class Text(Generator):
    """A causal language model. ``plain``: the checkpoint that Transformers reads, if it is another one."""

    def __init__(
        self, folder: Path, *, plain: Path | None = None, texts: Sequence[str] = TEXTS, **options: Any
    ) -> None:
        super().__init__(folder, **options)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = plain or folder
        self.reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(source)
        self.prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in texts]

    @torch.inference_mode()
    def logits(self, number: int, output: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[*self.prompts[number]["prompt_token_ids"], *output]])
        found: torch.Tensor = self.reference(input_ids=ids, use_cache=False).logits[0].float()
        return found

    def prompt_length(self, number: int) -> int:
        return len(self.prompts[number]["prompt_token_ids"])


class Pictures(Generator):
    """A LLaVA; some of its prompts have images."""

    bias = dict.fromkeys(range(FIRST, 256), -100.0)

    def __init__(self, folder: Path, reference: Any, processor: Any, **options: Any) -> None:
        super().__init__(folder, **options)
        self.reference, self.processor = reference, processor
        draw = torch.Generator().manual_seed(1)
        first, second = (torch.randint(0, 255, (60, 90, 3), generator=draw).to(torch.uint8).numpy() for _ in range(2))
        self.plans: list[tuple[str, list[Any]]] = [
            ("A model <image> is loaded", [first]),
            ("<image> and the quick brown fox <image> stay apart", [second, first]),
            (TEXTS[2], []),
            ("A model <image> is loaded, its layers are placed", [second]),
        ]
        self.prompts = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in self.plans]

    def _inputs(self, number: int) -> dict[str, torch.Tensor]:
        text, images = self.plans[number]
        return dict(self.processor(text=[text], return_tensors="pt", **({"images": images} if images else {})))

    @torch.inference_mode()
    def logits(self, number: int, output: Sequence[int]) -> torch.Tensor:
        inputs = self._inputs(number)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([list(output)], dtype=torch.int64)], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        found: torch.Tensor = self.reference(**inputs, use_cache=False).logits[0].float()
        return found

    def prompt_length(self, number: int) -> int:
        return int(self._inputs(number)["input_ids"].shape[1])


class Encoder(Model):
    """A BERT that embeds: its first token's hidden state, scaled to length 1."""

    def __init__(self, folder: Path, *, plain: Path | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        from transformers import BertModel

        self.reference = BertModel.from_pretrained(plain or folder, dtype=torch.float32).eval()
        draw = torch.Generator().manual_seed(3)
        lengths = (1, 3, 20, 20, 50, 7)
        self.prompts = [
            {"prompt_token_ids": torch.randint(3, 250, (length,), generator=draw).tolist()} for length in lengths
        ]

    @functools.cached_property
    def wanted(self) -> list[torch.Tensor]:
        """[H] of every prompt."""
        return [self._embedding(prompt["prompt_token_ids"]) for prompt in self.prompts]

    @torch.inference_mode()
    def _embedding(self, ids: list[int]) -> torch.Tensor:
        hidden = self.reference(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
        found: torch.Tensor = hidden / hidden.norm()
        return found

    def assert_same(self, llm: LLM, prompts: Sequence[int] | None = None) -> list[Any]:
        numbers = range(len(self.prompts)) if prompts is None else prompts
        outputs = llm.embed([self.prompts[number] for number in numbers], use_tqdm=False)
        for number, output in zip(numbers, outputs, strict=True):
            assert (torch.tensor(output.embedding) - self.wanted[number]).abs().max() <= TOLERANCE
        return outputs


class Models:
    """Every column's, made once, when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], Model] = {}

    def get(self, column: str, variant: str = "") -> Model:
        key = (column, variant)
        if key not in self._made:
            folder = self._folder / "-".join(filter(None, key)).replace(" ", "-")
            self._made[key] = VARIANTS[key](folder)
        return self._made[key]


def _fp8(make: Callable[[Path], Path], served: type[Any], **options: Any) -> Callable[[Path], Model]:
    def build(folder: Path) -> Model:
        quantised, plain = fp8_and_plain(make(folder))
        found: Model = served(quantised, plain=plain, **options)
        return found

    return build


def _fp8_pictures(folder: Path) -> Model:
    path, model, processor = llava(folder)
    quantised, plain = fp8_and_plain(path)
    reference = type(model).from_pretrained(plain, dtype=torch.float32).eval()
    return Pictures(quantised, reference, processor)


def _gguf(**options: Any) -> Model:
    plain, file = or_skip(smollm2_dir, "float32"), or_skip(smollm2_gguf)
    texts = ("The capital of France is", "def fibonacci(n):")
    return Text(file, plain=plain, texts=texts, kv_cache_memory_bytes=1 << 26, **options)


def _with_draft_layer(folder: Path) -> Model:
    served, plain = deepseek_with_draft_layer(folder)
    return Text(served, plain=plain, model_impl="native")


_TRANSFORMERS: Mapping[str, Any] = {"model_impl": "transformers"}

#: (column, what it shows) -> how it is made in a folder.
VARIANTS: Mapping[tuple[str, str], Callable[[Path], Model]] = {
    ("native", ""): lambda folder: Text(llama(folder), model_impl="native"),
    ("native", "deepseek"): lambda folder: Text(deepseek(folder), model_impl="native"),
    ("native", "deepseek with a draft layer"): _with_draft_layer,
    ("native", "fp8"): _fp8(llama, Text, model_impl="native"),
    ("native", "gguf"): lambda folder: _gguf(model_impl="native"),
    ("transformers", ""): lambda folder: Text(qwen3_moe(folder), **_TRANSFORMERS),
    ("transformers", "fp8"): _fp8(llama, Text, **_TRANSFORMERS),
    ("transformers", "gguf"): lambda folder: _gguf(**_TRANSFORMERS),
    ("encoder", ""): lambda folder: Encoder(bert(folder)),
    ("encoder", "fp8"): _fp8(bert, Encoder),
    ("media", ""): lambda folder: Pictures(*llava(folder)),
    ("media", "media with experts"): lambda folder: Pictures(*llava_moe(folder)),
    ("media", "fp8"): _fp8_pictures,
}


@contextmanager
def steps_of(llm: LLM) -> Iterator[list[int]]:
    """While open, the number of tokens of every sequence's part of every step goes into the list."""
    runner: Any = llm.engine.runner
    run, found = runner.run, list[int]()

    def counted(batch: Any) -> Any:
        found.extend(int(count) for count in batch.new)
        return run(batch)

    runner.run = counted
    try:
        yield found
    finally:
        del runner.run
