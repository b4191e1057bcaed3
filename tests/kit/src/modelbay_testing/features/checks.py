"""The test of each feature on a model where it works, or where it must change nothing.

A check is called with the model and with whether the feature is there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from modelbay import LLM
from modelbay_testing.features.models import OUTPUT_TOKENS, TOLERANCE, Generator, Model, steps_of

Check = Callable[[Any, bool], None]
_CHOICES = ("the fox", "the dog", "words", "Numbers 12")


def chunked_prefill(model: Model, works: bool) -> None:
    with model.open(max_num_batched_tokens=7) as llm, steps_of(llm) as steps:
        model.assert_same(llm)
    assert (max(steps) <= 7) is works


def prefix_cache(model: Model, works: bool) -> None:
    with model.open(block_size=4) as llm:
        for _ in range(2):
            outputs = model.assert_same(llm)
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert all(cached[0::2]) if works else not any(cached)


def preemption(model: Model, works: bool) -> None:
    with model.open() as llm:
        layout = llm.engine.kv.layout if works else None
    tight = 1
    if layout is not None:
        blocks = layout.blocks_for(64, 16) + 1
        tight = blocks * layout.page_elements() * 4
    options: dict[str, Any] = {"enable_prefix_caching": False, "kv_cache_memory_bytes": tight}
    with model.open(max_model_len=64, max_num_batched_tokens=16, **options) as llm:
        model.assert_same(llm)
        assert (llm.engine.scheduler.num_preemptions > 0) is works


def logprobs(model: Generator, works: bool) -> None:
    with model.open() as llm:
        outputs = llm.generate(model.prompts, model.params(logprobs=3), use_tqdm=False)
    for number, output in enumerate(outputs):
        completion = output.outputs[0]
        assert completion.token_ids == model.wanted[number]
        rows = model.logits(number, completion.token_ids)[model.prompt_length(number) - 1 : -1]
        _compare(completion.logprobs, rows, completion.token_ids)


def prompt_logprobs(model: Generator, works: bool) -> None:
    with model.open(max_num_batched_tokens=16) as llm:
        outputs = llm.generate(model.prompts, model.params(prompt_logprobs=3, max_tokens=1), use_tqdm=False)
    for number, output in enumerate(outputs):
        assert len(output.prompt_token_ids) == len(output.prompt_logprobs) == model.prompt_length(number)
        assert output.prompt_logprobs[0] is None
        rows = model.logits(number, [])[:-1]
        _compare(output.prompt_logprobs[1:], rows, output.prompt_token_ids[1:])


def _compare(found: list[Any], logits: torch.Tensor, tokens: list[int]) -> None:
    """Log-probabilities of the tokens that stand there and of the three likeliest. logits: [T, V]"""
    expected = logits.log_softmax(-1)
    assert len(found) == len(expected) == len(tokens)
    for entries, row, token in zip(found, expected, tokens, strict=True):
        assert {token, *row.topk(3).indices.tolist()} == set(entries)
        for listed, entry in entries.items():
            assert abs(entry.logprob - float(row[listed])) <= TOLERANCE
            assert entry.rank == 1 + int((row > row[listed]).sum())


def stop_strings(model: Generator, works: bool) -> None:
    with model.open() as llm:
        [output] = model.assert_same(llm, [0])
        text = output.outputs[0].text
        middle = text[len(text) // 2 :][:2]
        [stopped] = llm.generate(model.prompts[:1], model.params(stop=["no such thing", middle]), use_tqdm=False)
    completion = stopped.outputs[0]
    assert completion.text == text[: text.index(middle)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", middle)
    assert len(completion.token_ids) < OUTPUT_TOKENS


def several(model: Generator, works: bool) -> None:
    drawn = model.params(temperature=1.0, seed=7, n=3)
    with model.open() as llm:
        [likeliest] = llm.generate(model.prompts[:1], model.params(temperature=1.0, top_k=1, n=3), use_tqdm=False)
        first, second = (_tokens(llm.generate(model.prompts[:1], drawn, use_tqdm=False)) for _ in range(2))
    assert _tokens([likeliest]) == [model.wanted[0]] * 3
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3


def _tokens(outputs: Iterable[Any]) -> list[list[int]]:
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def streaming(model: Generator, works: bool) -> None:
    with model.open() as llm:
        for number, prompt in enumerate(model.prompts):
            grown = [output.outputs[0] for output in llm.stream(prompt, model.params())]
            assert len(grown) > OUTPUT_TOKENS // 2
            assert list(grown[-1].token_ids) == model.wanted[number]
            for before, after in itertools.pairwise(grown):
                assert after.text.startswith(before.text)
                assert len(after.token_ids) > len(before.token_ids)


def tensor_parallel(model: Model, works: bool) -> None:
    shares = _on_two_ranks(model, tensor_parallel_size=2)
    assert max(shares) < 0.8


def pipeline_parallel(model: Model, works: bool) -> None:
    shares = _on_two_ranks(model, pipeline_parallel_size=2)
    assert max(shares) < 0.8


def data_parallel(model: Model, works: bool) -> None:
    shares = _on_two_ranks(model, data_parallel_size=2)
    assert shares[0] == shares[1]
    assert min(shares) > 0.9


def expert_parallel(model: Model, works: bool) -> None:
    shares = _on_two_ranks(model, data_parallel_size=2, enable_expert_parallel=True)
    assert max(shares) < 0.9, "what is not expert is there twice"


def _on_two_ranks(model: Model, **sizes: Any) -> list[float]:
    """The share of the model's parameters that each rank has."""
    whole = sum(parameter.numel() for parameter in model.reference.parameters())
    with model.open(max_num_batched_tokens=32, **sizes) as llm:
        model.assert_same(llm)
        counts = llm.apply_model(lambda module: sum(parameter.numel() for parameter in module.parameters()))
    assert len(counts) == 2
    return [count / whole for count in counts]


def fp8(model: Model, works: bool) -> None:
    with model.open() as llm:
        model.assert_same(llm)
        assert llm.load_report.unaccounted() == []
        assert "float8_e4m3fn -> float32" in llm.load_report.casts


def gguf(model: Model, works: bool) -> None:
    with model.open() as llm:
        model.assert_same(llm)
        assert llm.load_report.format == "gguf"


def structured_output(model: Generator, works: bool) -> None:
    shape = r"[A-Z][a-z]{2,4} \d{2}:\d{2}"
    wanted: list[dict[str, Any]] = [{"choice": list(_CHOICES)}] * len(model.prompts) + [{"regex": shape}]
    prompts = [*model.prompts, model.prompts[0]]
    params = [model.params(structured_outputs=one, ignore_eos=False, max_tokens=40) for one in wanted]
    with model.open() as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
        assert re.fullmatch(shape, texts.pop())
        assert texts == [_likeliest_choice(model, number, llm) for number in range(len(model.prompts))]


def _likeliest_choice(model: Generator, number: int, llm: LLM) -> str:
    """Of the choices, what Transformers' logits lead to if every token must go on with one of them, or end it."""
    tokenizer = llm.get_tokenizer()
    pieces = {token: tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer))}
    output, text = list[int](), ""
    while True:
        row = model.biased(model.logits(number, output)[-1])
        fits = [token for token, piece in pieces.items() if piece and _goes_on(text + piece)]
        if text in _CHOICES:
            fits.append(tokenizer.eos_token_id)
        token = max(fits, key=lambda one: float(row[one]))
        if token == tokenizer.eos_token_id:
            return text
        output.append(token)
        text += pieces[token]


def _goes_on(text: str) -> bool:
    return any(choice.startswith(text) for choice in _CHOICES)


def speculation(model: Generator, works: bool) -> None:
    with model.open(speculative_config={"method": "mtp", "num_speculative_tokens": 1}) as llm:
        outputs = model.assert_same(llm)
    assert all(output.metrics.num_draft_tokens > 0 for output in outputs)


#: Feature -> its test.
CHECKS: Mapping[str, Check] = {
    "chunked prefill": chunked_prefill,
    "prefix cache": prefix_cache,
    "preemption": preemption,
    "logprobs": logprobs,
    "prompt logprobs": prompt_logprobs,
    "stop strings": stop_strings,
    "n > 1": several,
    "streaming": streaming,
    "tensor parallel": tensor_parallel,
    "pipeline parallel": pipeline_parallel,
    "data parallel": data_parallel,
    "expert parallel": expert_parallel,
    "quantization: fp8": fp8,
    "quantization: GGUF": gguf,
    "structured output": structured_output,
    "speculation": speculation,
}
