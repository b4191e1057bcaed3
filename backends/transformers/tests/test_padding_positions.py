"""X1: models that number positions over the tokens that are no padding get such positions, whatever is in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from modelbay import LLM, PoolingParams, SamplingParams
from modelbay.errors import UsageError
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.parallel import mesh_logits
from modelbay_testing.tiny import tiny_checkpoint, tiny_tokenizer

PAD = 1
#: Padding first, in the middle, twice, last, alone; and neighbours in one batch that have none.
PROMPTS = [[5, 6, 7], [PAD, 5, 6], [5, PAD, 7], [8, PAD, 9, 9, PAD, PAD, 10, 11], [PAD], [12, 13, PAD], [14, 15]]
FAMILIES = ["roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"]


def checkpoint(path: Path, model_type: str, **overrides: Any) -> Path:
    values = {"pad_token_id": PAD, "default_language": "en_XX", "type_vocab_size": 2, **overrides}
    return tiny_checkpoint(path, model_type, max_position_embeddings=66, bos_token_id=0, **values)


def load(path: Path, **arguments: Any) -> LLM:
    return LLM(str(path), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 22, **arguments)


def hidden_states(path: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).last_hidden_state[0]
            for ids in prompts
        ]


def check(path: Path) -> None:
    with load(path, runner="pooling") as llm:
        found = llm.encode([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    for output, expected in zip(found, hidden_states(path, PROMPTS), strict=True):
        assert (output.hidden_states - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("model_type", FAMILIES)
def test_x1_padding_inside_a_prompt(model_type: str, tmp_path: Path) -> None:
    check(checkpoint(tmp_path, model_type))


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_x1_esm_numbers_its_tokens_so_where_it_has_a_table(positions: str, tmp_path: Path) -> None:
    """Its rule is a function of its file and no method; turned, it counts every token."""
    from transformers import EsmConfig, EsmModel

    config = EsmConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=66, pad_token_id=PAD, mask_token_id=60, position_embedding_type=positions,
    )  # fmt: skip
    torch.manual_seed(0)
    model = EsmModel(config, add_pooling_layer=False).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path)
    with load(tmp_path, runner="pooling") as llm:
        found = llm.encode([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    for output, expected in zip(found, hidden_states(tmp_path, PROMPTS), strict=True):
        assert (output.hidden_states - expected).abs().max() <= 1e-4


def test_p2_padding_inside_a_text_that_is_classified(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "xlm-roberta")
    torch.manual_seed(0)
    reference: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=3).eval()
    for parameter in reference.classifier.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    reference.save_pretrained(path)
    with load(path) as llm:
        raw = PoolingParams(use_activation=False)
        found = llm.classify([{"prompt_token_ids": ids} for ids in PROMPTS], raw, use_tqdm=False)
    with torch.inference_mode():
        for output, ids in zip(found, PROMPTS, strict=True):
            expected = reference(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits
            assert (torch.tensor(output.probs) - expected[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=2)], ids=str)
def test_d2_the_same_over_ranks(mesh: Mesh, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "head", "xlm-roberta")
    AutoModel.from_pretrained(path, add_pooling_layer=False).save_pretrained(path)
    found = mesh_logits(
        path, mesh, PROMPTS, decoded=0, model_impl="transformers", max_model_len=64, runner="pooling",
        tensor_parallel_size=mesh.tp, pipeline_parallel_size=mesh.pp,
    )  # fmt: skip
    assert worst_difference(found, hidden_states(path, PROMPTS)) <= 1e-4


def test_x1_a_decoder_refuses_a_prompt_with_padding_by_name(tmp_path: Path) -> None:
    """What a step before had of it, the cache does not say."""
    path = checkpoint(tmp_path, "roberta", is_decoder=True)
    with load(path, max_num_batched_tokens=8) as llm:
        found = engine_logits(llm, [[5, 6, 7], list(range(20, 45))], 3)
        assert PAD not in [token for ids, _ in found for token in ids]
        with pytest.raises(UsageError, match=r"token 1, which is padding, which RobertaModel leaves out"):
            llm.generate({"prompt_token_ids": [5, PAD, 7]}, SamplingParams(max_tokens=1), use_tqdm=False)
        assert len(engine_logits(llm, [[8, 9]], 2)) == 1  # and goes on
    assert worst_difference([rows for _, rows in found], transformers_logits(path, [ids for ids, _ in found])) <= 1e-4
