"""What stands before a text, and what is made of both before tokens are: against sentence-transformers, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM, PoolingParams
from modelbay.errors import UsageError

Make = Callable[..., tuple[Path, Any]]
Open = Callable[..., LLM]
QUERY = "the fox"
TEXTS = ["The quick brown FOX", "jumps over the lazy DOG", "A <S> b </s> C", "over and over it again"]
MODULE = "sentence_transformers.models."
CROSS_ENCODERS = ["BertForSequenceClassification", "Qwen2ForSequenceClassification"]


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def embedder(path: Path, prompts: dict[str, str], *, default: str | None = None, **pooling: Any) -> Path:
    entries = [{"type": MODULE + "Transformer", "path": ""}, {"type": MODULE + "Pooling", "path": "1_Pooling"}]
    write(path, "modules.json", [{"idx": i, "name": str(i), **entry} for i, entry in enumerate(entries)])
    write(path, "1_Pooling/config.json", {"embedding_dimension": 64, "pooling_mode": "mean", **pooling})
    write(path, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default})
    return path


def cross_encoder(path: Path, *, lower: bool = False, **given: Any) -> tuple[Path, Any]:
    """As sentence-transformers saves it, and its own object."""
    from sentence_transformers import CrossEncoder

    saved = path.parent / "saved"
    CrossEncoder(str(path), device="cpu", **given).save(str(saved))
    if lower:
        config = json.loads((saved / "sentence_bert_config.json").read_text(encoding="utf-8"))
        write(saved, "sentence_bert_config.json", {**config, "do_lower_case": True})
    return saved, CrossEncoder(str(saved), device="cpu", local_files_only=True)


def furthest(llm: LLM, expected: Any, texts: list[str], **options: Any) -> float:
    scores = [output.score for output in llm.score(QUERY, texts, use_tqdm=False, **options)]
    return max(abs(score - float(wanted)) for score, wanted in zip(scores, expected, strict=True))


def embedded_apart(llm: LLM, path: Path, texts: list[str], **options: Any) -> float:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    expected = model.encode(texts, convert_to_tensor=True, **options).cpu()
    found = torch.tensor([output.embedding for output in llm.embed(texts, use_tqdm=False, **options)])
    return float((found - expected).abs().max())


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_a_cross_encoders_prompts_stand_before_the_query(name: str, lower: bool, make: Make, open_model: Open) -> None:
    prompts = {"q": "Find: ", "other": "Or: "}
    path, reference = cross_encoder(make(name, num_labels=1)[0], lower=lower, prompts=prompts, default_prompt_name="q")
    pairs = [(QUERY, text) for text in TEXTS]
    llm = open_model(path)
    default, without = reference.predict(pairs), reference.predict(pairs, prompt="")
    assert max(abs(float(a - b)) for a, b in zip(default, without, strict=True)) > 1e-3, "the prompt matters"
    assert furthest(llm, default, TEXTS) <= 1e-5
    assert furthest(llm, without, TEXTS, prompt="") <= 1e-5
    assert furthest(llm, reference.predict(pairs, prompt="So "), TEXTS, prompt="So ") <= 1e-5
    assert furthest(llm, reference.predict(pairs, prompt_name="other"), TEXTS, prompt_name="other") <= 1e-5
    said = {decision.question: decision.answer for decision in llm.resolution.trace.decisions}
    assert said["default prompt"] == "q: 'Find: '"
    with pytest.raises(UsageError, match=r"no prompt 'passage' \(known: other, q\)"):
        llm.score(QUERY, TEXTS, prompt_name="passage")


def test_prompts_are_of_the_kind_of_model_that_they_were_saved_with(make: Make, open_model: Open) -> None:
    """sentence-transformers drops them where it makes a cross-encoder of an embedder, or the other way round."""
    from sentence_transformers import CrossEncoder

    folder, _ = make("BertForSequenceClassification", num_labels=1)
    path, _ = cross_encoder(folder, prompts={"q": "Find: "}, default_prompt_name="q")
    llm = open_model(path, convert="embed", pooler_config={"pooling_type": "mean", "normalize": False})
    assert embedded_apart(llm, path, TEXTS) <= 1e-5
    write(folder, "config_sentence_transformers.json", {"prompts": {"q": "Find: "}, "default_prompt_name": "q"})
    write(folder, "sentence_bert_config.json", {"do_lower_case": True})  # of what has no modules.json it reads neither
    expected = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in TEXTS])
    assert furthest(open_model(folder), expected, TEXTS) <= 1e-5


def test_a_model_that_embeds_has_a_prompt_for_each_side(make: Make, open_model: Open) -> None:
    llm = open_model(embedder(make("BertModel")[0], {"query": "find: "}))
    for said in ({"prompt": "x"}, {"prompt_name": "query"}):
        with pytest.raises(UsageError, match="are for cross-encoders: a model that embeds has a prompt for each side"):
            llm.score(QUERY, TEXTS, **said)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("name", ["BertModel", "LlamaModel"])
def test_lower_case_is_of_the_prompt_too(name: str, include: bool, make: Make, open_model: Open) -> None:
    """And of no special token, nor does it make one: the library lower-cases between the special tokens of a text."""
    path = embedder(make(name)[0], {"query": "Query NOW: "}, default="query", include_prompt=include)
    write(path, "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    llm = open_model(path)
    texts = [f"{text} and MORE of it" for text in TEXTS]
    assert embedded_apart(llm, path, texts) <= 1e-5
    assert embedded_apart(llm, path, texts, prompt="") <= 1e-5
    [cut] = llm.embed("AND so on " * 90, PoolingParams(truncate_prompt_tokens=9), use_tqdm=False)
    [whole] = llm.embed("and so on " * 9, use_tqdm=False)
    assert cut.prompt_token_ids == whole.prompt_token_ids[:9]


@pytest.mark.parametrize("name", [*CROSS_ENCODERS, "LlamaForSequenceClassification"])
@pytest.mark.parametrize("template", [None, "<s> $A </s> $B </s>"])
def test_an_empty_document_is_the_second_of_a_pair(
    name: str, template: str | None, make: Make, open_model: Open
) -> None:
    """Of a single pair Transformers takes a false second text for none."""
    path, _ = make(name, num_labels=1)
    if template is not None:
        from tokenizers import Tokenizer, processors

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        tokenizer.save(str(path / "tokenizer.json"))
    path, reference = cross_encoder(path)
    texts = ["", "The quick fox", " "]
    llm = open_model(path)
    expected = reference.predict([(QUERY, text) for text in texts])
    assert furthest(llm, expected, texts) <= 1e-5
    cut = PoolingParams(truncate_prompt_tokens=-1)
    assert furthest(llm, expected, texts, pooling_params=cut) <= 1e-5
    assert abs(llm.score("", ["a"], use_tqdm=False)[0].score - float(reference.predict([("", "a")])[0])) <= 1e-5


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("ends", [False, True])
def test_t4_one_bos_in_a_text_that_is_cut_or_could_have_been(
    side: str, ends: bool, make: Make, open_model: Open
) -> None:
    path, _ = make("BertModel")
    if ends:
        from tokenizers import Tokenizer, processors

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        tokenizer.save(str(path / "tokenizer.json"))
    llm = open_model(path, max_model_len=64)
    llm.get_tokenizer().truncation_side = side
    for text in ("<s> fox", "<s>fox and dog", "<s><s><s> fox and dog", "fox <s> dog", "<s><s>"):
        [whole] = llm.embed(text, use_tqdm=False)
        ids = whole.prompt_token_ids
        assert ids[:2] != [1, 1]
        for keep in (-1, *range(3, len(ids) + 2)):
            [cut] = llm.embed(text, PoolingParams(truncate_prompt_tokens=keep), use_tqdm=False)
            tail = [2] if ends else []
            body, room = ids[1 : len(ids) - len(tail)], (64 if keep == -1 else keep) - 1 - len(tail)
            kept = body[:room] if side == "right" else body[-room:]
            wanted = [1, *kept, *tail]
            assert cut.prompt_token_ids == (wanted if wanted[:2] != [1, 1] else wanted[1:])


def test_t4_one_bos_in_a_prompt_that_is_not_pooled(make: Make, open_model: Open) -> None:
    path = embedder(make("BertModel")[0], {"query": "<s>Find: "}, include_prompt=False)
    llm = open_model(path)
    [output] = llm.embed("a fox", prompt_name="query", use_tqdm=False)
    write(path, "config_sentence_transformers.json", {"prompts": {"query": "Find: "}})
    [expected] = open_model(path).embed("a fox", prompt_name="query", use_tqdm=False)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.embedding == pytest.approx(expected.embedding, abs=1e-6)


def test_lower_case_without_a_rust_engine() -> None:
    """A tokenizer in Python: special tokens stay, and a capital sigma becomes the same letter wherever it stands."""
    from modelbay_runtime.pooling.inputs import read_pair, read_text, tokens_before

    class Words:
        lowering = None
        adds_bos = False
        all_special_tokens = ("[SEP]", "<s>")
        all_special_ids = ()
        seen: tuple[Any, ...] = ()

        def __call__(self, *texts: Any, **options: Any) -> dict[str, Any]:
            self.seen = texts
            return {"input_ids": [[1]] if isinstance(texts[0], list) else [1]}

    words, params = Words(), PoolingParams()
    read_text("A [SEP] ΑΣ <S>", words, 9, params, 9, before="Find: ", lower=True)
    assert words.seen == ("find: a [SEP] ασ <s>",)
    read_pair("A [SEP]", "B", words, 9, params, 9, num_types=None, before="Find: ", lower=True)
    assert words.seen == (["find: a [SEP]"], ["b"])
    tokens_before(words, "Find: ", lower=True)
    assert words.seen == ("find: ",)
