"""all-MiniLM-L6-v2 against sentence-transformers itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelbay import LLM, PoolingParams
from modelbay.cli.main import run
from modelbay.errors import UsageError
from modelbay_testing.assets import minilm_dir, or_skip

#: Cosine distance that two embeddings of one text may have.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def path() -> Path:
    return or_skip(minilm_dir)


@pytest.fixture(scope="module")
def minilm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(path), device="cpu", local_files_only=True)


def distance(found: list[list[float]], expected: torch.Tensor) -> float:
    """The largest cosine distance of two embeddings of one text."""
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(found), expected, dim=-1)
    return float((1 - cosines).max())


def test_200_real_sentences_embed_as_sentence_transformers_embeds_them(
    minilm: LLM, reference: Any, sentences: list[str]
) -> None:
    outputs = minilm.embed(sentences, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    expected = reference.encode(sentences, convert_to_tensor=True)
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 200
    assert distance([output.embedding for output in outputs], expected) <= TOLERANCE
    assert outputs[7].prompt == sentences[7]
    assert outputs[7].outputs.embedding == outputs[7].embedding
    assert abs(sum(x * x for x in outputs[7].embedding) - 1) < 1e-5


def test_a_text_that_is_too_long_is_refused_and_cut_as_sentence_transformers_cuts_it_where_asked(
    minilm: LLM, reference: Any
) -> None:
    text = "one two three four five " * 100
    with pytest.raises(UsageError, match=r"prompt 1: the prompt has 502 tokens; with max_model_len=256"):
        minilm.embed(["short", text], use_tqdm=False)
    [cut] = minilm.embed(text, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(cut.prompt_token_ids) == 256
    assert distance([cut.embedding], reference.encode([text], convert_to_tensor=True)) <= TOLERANCE


def test_the_length_that_the_checkpoint_was_made_for_is_a_default_and_its_positions_the_limit(path: Path) -> None:
    with LLM(str(path), dtype="float32", max_model_len=512) as llm:
        [output] = llm.embed({"prompt_token_ids": [101, *[2054] * 510, 102]}, use_tqdm=False)
        assert len(output.prompt_token_ids) == 512
        with pytest.raises(UsageError, match="513 tokens"):
            llm.embed({"prompt_token_ids": [101, *[2054] * 511, 102]}, use_tqdm=False)


def test_an_empty_text_embeds_since_the_tokenizer_adds_special_tokens(minilm: LLM, reference: Any) -> None:
    [output] = minilm.embed("", use_tqdm=False)
    assert len(output.prompt_token_ids) == 2
    assert distance([output.embedding], reference.encode([""], convert_to_tensor=True)) <= TOLERANCE


def test_score_of_an_embedding_model_is_the_cosine(minilm: LLM, reference: Any) -> None:
    query, texts = "How big is London?", ["London has 9,787,426 inhabitants.", "Bread is made of flour.", "9 million"]
    found = [output.score for output in minilm.score(query, texts, use_tqdm=False)]
    expected = reference.similarity(*(reference.encode(x, convert_to_tensor=True) for x in ([query], texts)))[0]
    assert torch.tensor(found).sub(expected.cpu()).abs().max() <= TOLERANCE
    assert found[0] > found[2] > found[1]


def test_case_38_dimensions_are_cut_before_the_vector_is_scaled(minilm: LLM) -> None:
    [whole] = minilm.embed("a text", PoolingParams(normalize=False), use_tqdm=False)
    [cut] = minilm.embed("a text", PoolingParams(dimensions=64), use_tqdm=False)
    first = torch.tensor(whole.embedding[:64])
    assert torch.allclose(torch.tensor(cut.embedding), first / first.norm(), atol=1e-6)
    with pytest.raises(UsageError, match="dimensions=400, and the embedding has 384"):
        minilm.embed("a text", PoolingParams(dimensions=400), use_tqdm=False)


def test_case_36_changing_the_last_token_changes_the_first_tokens_state(minilm: LLM) -> None:
    ids = [101, *range(2000, 2030), 102]
    first, second = minilm.encode([{"prompt_token_ids": [*ids[:-1], last]} for last in (102, 1012)], use_tqdm=False)
    assert (first.hidden_states[0] - second.hidden_states[0]).abs().max() > 1e-3


@pytest.mark.parametrize("batch", [1, 7, 64, 256])
def test_batches_of_all_lengths_equal_one_at_a_time(minilm_512: LLM, batch: int) -> None:
    draw = torch.Generator().manual_seed(batch)
    lengths = [1, 512, *torch.randint(2, 48, (254,), generator=draw).tolist()][:batch]
    prompts = [
        {"prompt_token_ids": torch.randint(1000, 20000, (length,), generator=draw).tolist()} for length in lengths
    ]
    together = minilm_512.embed(prompts, use_tqdm=False)
    picked = range(0, batch, max(1, batch // 8))
    alone = [minilm_512.embed(prompts[place], use_tqdm=False)[0].embedding for place in picked]
    assert distance([together[place].embedding for place in picked], torch.tensor(alone)) <= 1e-6


@pytest.fixture(scope="module")
def minilm_512(path: Path) -> Iterator[LLM]:
    with LLM(str(path), dtype="float32", max_model_len=512, max_num_seqs=256) as llm:
        yield llm


def test_the_embed_command_writes_arrays_and_json_lines(
    path: Path, tmp_path: Path, minilm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["first text", "", "a third, with ümlauts"]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    expected = [output.embedding for output in minilm.embed(texts, use_tqdm=False)]
    command = ["embed", str(path), "--dtype", "float32", "--input", str(tmp_path / "in.txt")]
    assert run([*command, "--output", str(tmp_path / "out.npy")]) == 0
    assert capsys.readouterr().err == f"wrote 3 embeddings of 384 numbers to {tmp_path / 'out.npy'}\n"
    array = np.load(tmp_path / "out.npy", mmap_mode="r")
    assert array.dtype == np.float32
    assert array.shape == (3, 384)
    assert distance(array.tolist(), torch.tensor(expected)) <= TOLERANCE
    rows = "\n".join(json.dumps({"id": f"row {i}", "text": text}) for i, text in enumerate(texts))
    (tmp_path / "in.jsonl").write_text(rows, encoding="utf-8")
    command[-1] = str(tmp_path / "in.jsonl")
    capsys.readouterr()
    assert run([*command, "--dimensions", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == "wrote 3 embeddings of 8 numbers to standard output\n"
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry["id"] for entry in entries] == ["row 0", "row 1", "row 2"]
    assert [len(entry["embedding"]) for entry in entries] == [8, 8, 8]
    assert not list(tmp_path.glob("*.partial"))


def test_the_embed_command_names_the_line_that_it_cannot_embed(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("good\n" + "far too long " * 300 + "\n", encoding="utf-8")
    command = ["embed", str(path), "--dtype", "float32", "--input", str(tmp_path / "in.txt")]
    assert run([*command, "--output", str(tmp_path / "out.npy")]) == 2
    assert "in.txt, line 2: the prompt has 902 tokens" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.npy*"))
    assert run([*command, "--output", str(tmp_path / "out.npy"), "--truncate", "-1"]) == 0
    assert np.load(tmp_path / "out.npy").shape == (2, 384)


def test_the_score_command_says_the_best_documents(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs.txt").write_text("Bread is made of flour.\nLondon is a city of 9 million.\n", encoding="utf-8")
    command = [
        "score",
        str(path),
        "How big is London?",
        "--dtype",
        "float32",
        "--documents",
        str(tmp_path / "docs.txt"),
    ]
    assert run([*command, "--top", "1"]) == 0
    score, text = capsys.readouterr().out.strip().split("\t")
    assert text == "London is a city of 9 million."
    assert 0.5 < float(score) < 1
    assert run([*command, "--json"]) == 0
    assert [entry["line"] for entry in json.loads(capsys.readouterr().out)] == [1, 2]
