"""Embedding, classification and scores of model families, against Transformers in float32 on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM, PoolingParams
from modelbay.errors import UsageError

TOLERANCE = 1e-4
RAW = PoolingParams(use_activation=False)
Make = Callable[..., tuple[Path, Any]]
Open = Callable[..., LLM]

EMBEDDERS = ("BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel", "Qwen2Model", "LlamaModel")
CLASSIFIERS = (
    "BertForSequenceClassification", "RobertaForSequenceClassification", "XLMRobertaForSequenceClassification",
    "ModernBertForSequenceClassification", "Qwen2ForSequenceClassification", "LlamaForSequenceClassification",
)  # fmt: skip


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, 250, (length,), generator=draw).tolist() for length in lengths]


def given(ids: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": each} for each in ids]


def hidden(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def logits(model: Any, ids: list[int], **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), **inputs).logits[0]


REDUCE = {
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0).values,
    "mean_sqrt_len": lambda rows: rows.sum(0) / len(rows) ** 0.5,
    "weighted_mean": lambda rows: (rows * torch.arange(1.0, len(rows) + 1)[:, None]).sum(0) / sum(range(len(rows) + 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", EMBEDDERS)
def test_p1_embeddings_equal_transformers_hidden_states_pooled(name: str, make: Make, open_model: Open) -> None:
    path, model = make(name)
    ids = prompts(1, 3, 20, 20, 50, 7)
    causal = name in ("Qwen2Model", "LlamaModel")
    # Decoders take their prompts in pieces; an encoder's are never torn.
    llm = open_model(path, runner="pooling", max_model_len=64, max_num_batched_tokens=16)
    for mode in ("cls", "mean", "last"):
        params = PoolingParams(pooling_type=mode, normalize=False)
        outputs = llm.embed(given(ids), params, use_tqdm=False)
        for output, each in zip(outputs, ids, strict=True):
            assert (torch.tensor(output.embedding) - REDUCE[mode](hidden(model, each))).abs().max() <= TOLERANCE
    [default] = llm.embed(given(ids[2:3]), use_tqdm=False)
    expected = REDUCE["last" if causal else "cls"](hidden(model, ids[2]))
    assert (torch.tensor(default.embedding) - expected / expected.norm()).abs().max() <= TOLERANCE


@pytest.mark.parametrize("mode", sorted(REDUCE))
def test_every_way_to_pool_holds_in_pieces_and_whole(mode: str, make: Make, open_model: Open) -> None:
    path, model = make("LlamaModel")
    config = {"pooling_type": mode, "normalize": False}
    llm = open_model(path, pooler_config=config, max_model_len=128, max_num_batched_tokens=24)
    ids = prompts(1, 100, 5, 24, 25)
    for output, each in zip(llm.embed(given(ids), use_tqdm=False), ids, strict=True):
        assert (torch.tensor(output.embedding) - REDUCE[mode](hidden(model, each))).abs().max() <= TOLERANCE


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_p2_logits_of_classifiers_equal_transformers(name: str, impl: str, make: Make, open_model: Open) -> None:
    path, model = make(name)
    llm = open_model(path, model_impl=impl, max_model_len=64, max_num_batched_tokens=16)
    assert llm.resolution.task == "classify"
    assert llm.resolution.backend == ("native" if impl == "auto" and name[:5] in ("Qwen2", "Llama") else "transformers")
    ids = prompts(1, 3, 20, 20, 50)
    if llm.resolution.backend == "native" or name[:5] in ("Qwen2", "Llama"):
        ids += [[9, 8, 0, 0], [0, 7, 0]]  # what looks like padding is not the last token
    for output, each in zip(llm.classify(given(ids), RAW, use_tqdm=False), ids, strict=True):
        assert output.num_classes == 3
        assert (torch.tensor(output.outputs.probs) - logits(model, each)).abs().max() <= TOLERANCE


def test_p2_the_activation_is_applied_once(make: Make, open_model: Open) -> None:
    path, model = make("BertForSequenceClassification")
    ids = prompts(9)
    probabilities = {
        "softmax": torch.softmax(logits(model, ids[0]), -1), "sigmoid": torch.sigmoid(logits(model, ids[0]))
    }  # fmt: skip
    [output] = open_model(path).classify(given(ids), use_tqdm=False)
    assert (torch.tensor(output.probs) - probabilities["softmax"]).abs().max() <= TOLERANCE
    several = open_model(path, hf_overrides={"problem_type": "multi_label_classification"})
    [output] = several.classify(given(ids), use_tqdm=False)
    assert (torch.tensor(output.probs) - probabilities["sigmoid"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_head_that_pools_by_itself_gets_what_it_reads(pooling: str, make: Make, open_model: Open) -> None:
    path, model = make("ModernBertForSequenceClassification", classifier_pooling=pooling)
    llm = open_model(path, max_model_len=64)
    ids = prompts(1, 20, 20, 41)
    for output, each in zip(llm.classify(given(ids), RAW, use_tqdm=False), ids, strict=True):
        assert (torch.tensor(output.probs) - logits(model, each)).abs().max() <= TOLERANCE
    assert llm.apply_model(lambda module: module.reads) == ["first" if pooling == "cls" else "all"]


def test_without_a_token_for_padding_the_last_token_is_the_last(make: Make, open_model: Open) -> None:
    path, model = make("Qwen2ForSequenceClassification", pad_token_id=None)
    ids = prompts(4, 9, 9)
    for impl in ("native", "transformers"):
        outputs = open_model(path, model_impl=impl, max_model_len=64).classify(given(ids), RAW, use_tqdm=False)
        for output, each in zip(outputs, ids, strict=True):
            assert (torch.tensor(output.probs) - logits(model, each)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "XLMRobertaForSequenceClassification"])
def test_cross_encoders_score_pairs_as_the_tokenizer_joins_them(name: str, make: Make, open_model: Open) -> None:
    path, model = make(name, num_labels=1)
    _pairs_with_types(path)
    llm = open_model(path, max_model_len=64)
    query, documents = "the fox", ["the lazy dog", "a model", ""]
    outputs = llm.score(query, documents, RAW, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for output, document in zip(outputs, documents, strict=True):
        # Not the pair alone: Transformers takes an empty second text for none.
        encoded = {name: row[0] for name, row in tokenizer([query], [document]).items()}
        types = {"token_type_ids": torch.tensor([encoded["token_type_ids"]])} if name.startswith("Bert") else {}
        assert output.prompt_token_ids == encoded["input_ids"]
        expected = logits(model, encoded["input_ids"], **types)
        assert abs(output.outputs.score - float(expected[0])) <= TOLERANCE
        [score] = llm.score(query, document, use_tqdm=False)
        assert abs(score.score - float(torch.sigmoid(expected)[0])) <= TOLERANCE
    if name.startswith("Bert"):
        assert abs(outputs[0].score - float(logits(model, outputs[0].prompt_token_ids)[0])) > 1e-3, "types matter"


def _pairs_with_types(path: Path) -> None:
    """``<s> A </s> B </s>``, the second text of type 1 where the model has that type."""
    from tokenizers import Tokenizer, processors

    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    second = 1 if "Bert" in path.name and "Roberta" not in path.name else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=f"<s> $A </s> $B:{second} </s>:{second}", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(file)
    config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if second else [])]
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "model_input_names": names}), encoding="utf-8")


def test_a_score_needs_one_label(make: Make, open_model: Open) -> None:
    llm = open_model(make("BertForSequenceClassification")[0])
    with pytest.raises(UsageError, match="a classifier with one label, and this one has 3"):
        llm.score("a", ["b"])


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a1_a_generator_embeds_after_a_conversion_that_is_traced(impl: str, make: Make, open_model: Open) -> None:
    path, model = make("LlamaForCausalLM")
    with pytest.raises(UsageError, match=r"resolved to generate, and embed was asked .* convert='embed'"):
        open_model(path, model_impl=impl, max_model_len=64).embed("text")
    llm = open_model(path, model_impl=impl, convert="embed", max_model_len=64)
    said = {decision.question: decision.answer for decision in llm.resolution.trace.decisions}
    assert said["conversion"] == "LlamaForCausalLM -> embed"
    [output] = llm.embed(given(prompts(20)), PoolingParams(normalize=False), use_tqdm=False)
    assert (torch.tensor(output.embedding) - hidden(model.model, prompts(20)[0])[-1]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a1_a_native_classifier_embeds_with_convert_too(impl: str, make: Make, open_model: Open) -> None:
    path, model = make("LlamaForSequenceClassification")
    llm = open_model(path, model_impl=impl, convert="embed", max_model_len=64)
    [output] = llm.embed(given(prompts(20)), PoolingParams(normalize=False), use_tqdm=False)
    assert (torch.tensor(output.embedding) - hidden(model.model, prompts(20)[0])[-1]).abs().max() <= TOLERANCE


def test_a1_a_classifier_embeds_with_convert_and_leaves_its_head(make: Make, open_model: Open) -> None:
    path, model = make("BertForSequenceClassification")
    with pytest.raises(UsageError, match="resolved to classify, and embed was asked"):
        open_model(path).embed("text")
    [output] = open_model(path, convert="embed").embed(given(prompts(20)), PoolingParams(normalize=False))
    assert (torch.tensor(output.embedding) - hidden(model.bert, prompts(20)[0])[0]).abs().max() <= TOLERANCE


def test_an_embedders_last_token_reads_the_prefix_cache_and_changes_nothing(make: Make, open_model: Open) -> None:
    llm = open_model(make("Qwen2Model")[0], runner="pooling", max_model_len=128)
    [ids] = prompts(100)
    first, again = (llm.embed(given([ids]), use_tqdm=False)[0] for _ in range(2))
    assert (first.metrics.num_cached_tokens, again.metrics.num_cached_tokens) == (0, 96)
    assert torch.allclose(torch.tensor(first.embedding), torch.tensor(again.embedding), atol=1e-6)
    [mean] = llm.embed(given([ids]), PoolingParams(pooling_type="mean"), use_tqdm=False)
    assert mean.metrics.num_cached_tokens == 0


def test_sequences_that_push_each_other_out_are_pooled_once(make: Make, open_model: Open) -> None:
    """Preemption in the middle of a prompt: what was summed of it is forgotten."""
    path, model = make("LlamaModel")
    config = {"pooling_type": "mean", "normalize": False}
    llm = open_model(
        path, pooler_config=config, max_model_len=128, max_num_batched_tokens=48, kv_cache_memory_bytes=160_000
    )
    ids = prompts(*[100] * 6)
    outputs = llm.embed(given(ids), use_tqdm=False)
    for output, each in zip(outputs, ids, strict=True):
        assert (torch.tensor(output.embedding) - hidden(model, each).mean(0)).abs().max() <= TOLERANCE


def test_what_was_given_up_is_forgotten(make: Make, open_model: Open) -> None:
    config = {"pooling_type": "mean"}
    llm = open_model(make("LlamaModel")[0], pooler_config=config, max_model_len=128, max_num_batched_tokens=16)
    from modelbay_runtime.engine.prompts import Prompt

    engine = llm.engine
    engine.add_pooling_request("gone", Prompt(prompts(100)[0]), PoolingParams(task="embed"))
    engine.step()
    assert list(engine.executor.rank.pooler._partial) == ["gone"]
    engine.abort("gone")
    llm.embed("x", use_tqdm=False)
    assert not engine.executor.rank.pooler._partial
