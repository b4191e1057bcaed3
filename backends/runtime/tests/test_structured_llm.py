"""Structured outputs in a running engine: preempted, streamed, several for a prompt, beside others."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from modelbay import LLM, SamplingParams
from modelbay.errors import UsageError
from modelbay_testing.assets import or_skip, smollm2_dir

#: Printable ASCII alone, since that is what the tiny checkpoints' tokenizer has.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["tall", "old", "kind"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SPECS: list[dict[str, Any] | None] = [
    {"json": PERSON}, None, {"regex": r"\d{2}:\d{2} [ap]m"}, {"choice": ["yes", "no", "perhaps"]}, None,
    {"grammar": 'root ::= "(" root ")" | "x"'}, {"json": json.dumps({"type": "array", "items": PERSON, "maxItems": 1})},
    None,
]  # fmt: skip


def params(spec: dict[str, Any] | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120 if spec else 16, "structured_outputs": spec, "seed": 5, **more})


def check(spec: dict[str, Any] | None, completion: Any) -> None:
    if spec is None:
        return
    if completion.finish_reason == "length":  # only a grammar without an end may get there
        assert "grammar" in spec
        return
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    if "json" in spec:
        schema = spec["json"]
        jsonschema.validate(json.loads(completion.text), json.loads(schema) if isinstance(schema, str) else schema)
    elif "regex" in spec:
        assert re.fullmatch(spec["regex"], completion.text)
    elif "choice" in spec:
        assert completion.text in spec["choice"]
    else:
        assert re.fullmatch(r"(\(*)x(\)*)", completion.text)
        assert completion.text.count("(") == completion.text.count(")")


def content(outputs: list[Any]) -> list[Any]:
    return [(list(c.token_ids), c.text, c.finish_reason) for output in outputs for c in output.outputs]


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm("llama")


def test_a_batch_of_all_kinds_and_free_requests_as_if_alone(llm: LLM, prompts: list[Any]) -> None:
    wanted = [params(spec, temperature=temperature) for temperature in (0.0, 1.0) for spec in SPECS]
    mixed = llm.generate(prompts * 2, wanted, use_tqdm=False)
    for spec, output in zip(SPECS * 2, mixed, strict=True):
        check(spec, output.outputs[0])
    free = [place for place, one in enumerate(wanted) if one.structured_outputs is None]
    alone = llm.generate([(prompts * 2)[p] for p in free], [wanted[p] for p in free], use_tqdm=False)
    assert content(alone) == content([mixed[place] for place in free])
    one_by_one = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts * 2, wanted, strict=True)]
    assert content(one_by_one) == content(mixed)
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_usable


def test_preemption_does_not_lose_the_place_in_the_grammar(
    open_llm: Callable[..., LLM], llm: LLM, prompts: list[Any]
) -> None:
    options = {"max_num_batched_tokens": 64, "max_model_len": 256}
    layout = open_llm("llama", **options).engine.kv.layout
    blocks = layout.blocks_for(256, 64) + 1
    tight = open_llm("llama", **options, kv_cache_memory_bytes=blocks * layout.page_elements() * 4)
    some = [prompt for prompt in prompts if len(prompt["prompt_token_ids"]) < 110]
    wanted = [params(spec) for spec in SPECS[: len(some)]]
    outputs = tight.generate(some, wanted, use_tqdm=False)
    assert tight.engine.scheduler.num_preemptions > 0
    assert content(outputs) == content(llm.generate(some, wanted, use_tqdm=False))


def test_several_sequences_of_one_prompt_go_their_own_ways(llm: LLM, prompts: list[Any]) -> None:
    [output] = llm.generate(prompts[0], params({"json": PERSON}, n=6), use_tqdm=False)
    for completion in output.outputs:
        check({"json": PERSON}, completion)
    assert len({completion.text for completion in output.outputs}) > 1


def test_streaming_shows_what_generate_returns(llm: LLM, prompts: list[Any]) -> None:
    wanted = params({"json": PERSON}, logprobs=2)
    texts, last = [], None
    for last in llm.stream(prompts[1], wanted):
        texts.append(last.outputs[0].text)
    assert last is not None
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert content([last]) == content(llm.generate(prompts[1], wanted, use_tqdm=False))
    assert len(last.outputs[0].logprobs or []) == len(last.outputs[0].token_ids)


def test_a_complete_output_ends_whatever_the_model_calls_the_end(llm: LLM, prompts: list[Any]) -> None:
    for more in ({"ignore_eos": True}, {"min_tokens": 1}, {"detokenize": False}, {"max_tokens": 200}):
        [output] = llm.generate(prompts[0], params({"choice": ["yes"]}, **more), use_tqdm=False)
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None), more
    [output] = llm.generate(prompts[0], params({"choice": ["yes indeed"]}, stop=["in"]), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("yes ", "in")
    [output] = llm.generate(prompts[0], params({"regex": "[a-z]{200}"}, max_tokens=5), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_a_conflict_ends_its_own_request_with_the_reason(
    llm: LLM, prompts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [params(None), params({"choice": ["yes"]}, min_tokens=40, n=2), params({"json": PERSON})]
    with caplog.at_level(logging.WARNING, logger="modelbay"):
        outputs = llm.generate(prompts[:3], wanted, use_tqdm=False)
    assert [c.finish_reason for c in outputs[1].outputs] == ["error", "error"]
    assert "min_tokens" in str(outputs[1].outputs[0].stop_reason)
    assert "min_tokens" in caplog.text
    assert outputs[1].outputs[0].text == "yes"
    check({"json": PERSON}, outputs[2].outputs[0])
    assert content([outputs[0]]) == content(llm.generate(prompts[0], wanted[0], use_tqdm=False))
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_usable
    assert not llm.engine.requests


def test_what_cannot_be_used_is_refused_before_anything_runs(llm: LLM, prompts: list[Any]) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        llm.generate(prompts[:2], [params(None), params({"regex": "("})], use_tqdm=False)
    assert not llm.engine.requests
    assert not llm.engine.scheduler.has_work


def test_no_tokenizer_no_structured_output(llm: LLM, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from modelbay_runtime.engine.detokenizer import Detokenizer

    monkeypatch.setattr(llm.engine, "detokenizer", Detokenizer(None))
    with pytest.raises(UsageError, match="structured_outputs needs a tokenizer"):
        llm.generate(prompts[0], params({"regex": "a"}), use_tqdm=False)


@pytest.mark.real
def test_smollm2_answers_in_json() -> None:
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"type": "string", "maxLength": 20}}}  # type: ignore[dict-item]
    with LLM(str(or_skip(smollm2_dir, "bfloat16")), max_model_len=512) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=80, structured_outputs={"json": schema})
        question = [{"role": "user", "content": "Describe a person as JSON with name, age and tags."}]
        warm = greedy.replace(temperature=1.0, seed=3)
        for output in llm.chat([question, question], [greedy, warm], use_tqdm=False):
            assert output.outputs[0].finish_reason == "stop"
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
        capital = SamplingParams(temperature=0, structured_outputs={"choice": ["Berlin", "Paris", "Rome"]})
        [output] = llm.generate("The capital of France is the city of", capital, use_tqdm=False)
        assert output.outputs[0].text == "Paris"
