"""The layouts of sentence-transformers, old and new, against that library on tiny models it saved or would have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM, PoolingParams
from modelbay.errors import ConfigError, RemoteCodeError, TrustError, UsageError, WeightsError

Make = Callable[..., tuple[Path, Any]]
Open = Callable[..., LLM]
TEXTS = ["The quick brown fox", "jumps", "over the lazy dog and over it again"]
#: Each has tokens of its own after a prompt.
LONGER = [f"{text} and more of it" for text in TEXTS]
OLD = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def listed(*types: str) -> list[dict[str, Any]]:
    found = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, name in enumerate(types, 1):
        kind = name if "." in name else f"sentence_transformers.models.{name}"
        found.append({"idx": index, "name": str(index), "path": f"{index}_{name.rpartition('.')[2]}", "type": kind})
    return found


def reference(path: Path, texts: list[str], **options: Any) -> torch.Tensor:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    return model.encode(texts, convert_to_tensor=True, **options).cpu()


def embedded(llm: LLM, texts: list[str], params: PoolingParams | None = None, **options: Any) -> torch.Tensor:
    return torch.tensor([output.embedding for output in llm.embed(texts, params, use_tqdm=False, **options)])


def add_dense(path: Path, folder: str, outputs: int, *, file: str = "model.safetensors", **config: Any) -> None:
    from safetensors.torch import save_file

    state = {"linear.weight": torch.randn(outputs, 64) / 8, "linear.bias": torch.randn(outputs)}
    values = {"in_features": 64, "out_features": outputs, "bias": True, **config}
    write(path, f"{folder}/config.json", {"activation_function": "torch.nn.modules.activation.Tanh", **values})
    if file.endswith(".bin"):
        torch.save(state, path / folder / file)
    else:
        save_file(state, path / folder / file)


@pytest.mark.parametrize(
    "config",
    [
        OLD,
        {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"embedding_dimension": 64, "pooling_mode": "cls", "include_prompt": True},
        {"embedding_dimension": 64, "pooling_mode": ["weightedmean", "mean_sqrt_len_tokens"]},
    ],
)
def test_p1_pooling_schemas_equal_sentence_transformers(config: Any, make: Make, open_model: Open) -> None:
    path, _ = make("BertModel")
    write(path, "modules.json", listed("Pooling"))
    write(path, "1_Pooling/config.json", config)
    assert (embedded(open_model(path), TEXTS) - reference(path, TEXTS)).abs().max() <= 1e-4


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_p1_dense_and_normalize_equal_sentence_transformers(file: str, make: Make, open_model: Open) -> None:
    path, _ = make("BertModel")
    write(path, "modules.json", listed("Pooling", "Dense", "Normalize"))
    write(path, "1_Pooling/config.json", OLD)
    add_dense(path, "2_Dense", 32, file=file)
    llm = open_model(path)
    found = embedded(llm, TEXTS)
    assert found.shape == (3, 32)
    assert (found - reference(path, TEXTS)).abs().max() <= 1e-4
    cut = embedded(llm, TEXTS, PoolingParams(dimensions=8))
    assert (cut - reference(path, TEXTS, truncate_dim=8, normalize_embeddings=True)).abs().max() <= 1e-4


def test_what_sentence_transformers_saves_now_is_read(make: Make, open_model: Open, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer

    path, _ = make("ModernBertModel")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        stages = [Pooling(64, "mean"), Dense(64, 48, activation_function=torch.nn.GELU(), use_residual=True)]
        stages += [LayerNorm(48), Normalize()]
    model = SentenceTransformer(
        modules=[Transformer(str(path)), *stages], device="cpu", prompts={"query": "find: ", "document": ""}
    )
    model.default_prompt_name = "query"
    saved = tmp_path / "saved"
    model.save(str(saved))
    llm = open_model(saved)
    assert (embedded(llm, TEXTS) - reference(saved, TEXTS)).abs().max() <= 1e-4
    assert (
        embedded(llm, TEXTS, prompt_name="document") - reference(saved, TEXTS, prompt_name="document")
    ).abs().max() <= 1e-4
    assert (embedded(llm, TEXTS, prompt="a ") - reference(saved, TEXTS, prompt="a ")).abs().max() <= 1e-4
    scores = torch.tensor([output.score for output in llm.score("the fox", TEXTS, use_tqdm=False)])
    reloaded = SentenceTransformer(str(saved), device="cpu", local_files_only=True)
    expected = reloaded.similarity(reloaded.encode_query(["the fox"]), reloaded.encode_document(TEXTS))[0]
    assert (scores - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("mode", ["mean", "cls", "weightedmean"])
def test_a_prompt_that_is_not_pooled(mode: str, make: Make, open_model: Open) -> None:
    path, _ = make("BertModel")
    write(path, "modules.json", listed("Pooling"))
    write(path, "1_Pooling/config.json", {"embedding_dimension": 64, "pooling_mode": mode, "include_prompt": False})
    write(path, "config_sentence_transformers.json", {"prompts": {"query": "look for: "}})
    found = embedded(open_model(path), LONGER, prompt_name="query")
    assert (found - reference(path, LONGER, prompt_name="query")).abs().max() <= 1e-4


def test_a_prompt_that_the_model_does_not_have_is_refused(make: Make, open_model: Open) -> None:
    path, _ = make("BertModel")
    write(path, "config_sentence_transformers.json", {"prompts": {"query": "look for: "}})
    llm = open_model(path)
    with pytest.raises(UsageError, match=r"no prompt 'passage' \(known: query\)"):
        llm.embed("x", prompt_name="passage")
    with pytest.raises(UsageError, match="before a text, not before token ids"):
        llm.embed({"prompt_token_ids": [5]}, prompt_name="query")


def test_p2_a_module_of_the_repository_runs_with_trust_only(make: Make, open_model: Open) -> None:
    path, _ = make("BertModel")
    write(path, "modules.json", listed("Pooling", "scaling.Twice"))
    write(path, "1_Pooling/config.json", OLD)
    marker = path / "ran"
    (path / "scaling.py").write_text(
        f"import torch, pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "class Twice(torch.nn.Module):\n"
        "    def forward(self, features):\n"
        "        return {'sentence_embedding': 2 * features['sentence_embedding']}\n",
        encoding="utf-8",
    )
    with pytest.raises(TrustError, match=r"scaling\.Twice"):
        open_model(path)
    assert not marker.exists()
    doubled = embedded(open_model(path, trust_remote_code=True), TEXTS)
    write(path, "modules.json", listed("Pooling"))
    assert (doubled - 2 * reference(path, TEXTS)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"in_features": 32}, ConfigError, "2_Dense/config.json is for vectors of 32 numbers, .* of mean have 64"),
        ({"out_features": 16}, WeightsError, "2_Dense/model.safetensors holds .* its config makes it"),
        ({"out_features": 10**30}, ConfigError, "out_features 10+, which is no size of a vector"),
        ({"bias": False}, WeightsError, "2_Dense/model.safetensors holds"),
        ({"activation_function": "my.Act"}, ConfigError, r"names the activation 'my\.Act'"),
        ({"gate": True}, ConfigError, "2_Dense/config.json has gate, which is not known here"),
        ({"out_features": "32"}, ConfigError, "2_Dense/config.json has out_features '32'"),
        ({"module_input_name": "token_embeddings"}, ConfigError, "module_input_name 'token_embeddings'"),
    ],
)
def test_a_dense_module_that_does_not_fit_is_refused(
    config: Any, error: type, message: str, make: Make, open_model: Open
) -> None:
    path, _ = make("BertModel")
    write(path, "modules.json", listed("Pooling", "Dense"))
    write(path, "1_Pooling/config.json", OLD)
    add_dense(path, "2_Dense", 32, **config)
    with pytest.raises(error, match=message):
        open_model(path)


def test_a_module_of_the_repository_that_fails_says_so(make: Make, open_model: Open) -> None:
    path, _ = make("BertModel")
    write(path, "modules.json", listed("Pooling", "scaling.Twice"))
    write(path, "1_Pooling/config.json", OLD)
    (path / "scaling.py").write_text("class Twice:\n    def __init__(self):\n        raise OSError('no table')\n")
    with pytest.raises(RemoteCodeError, match=r"scaling\.Twice raised OSError while it was loaded: no table"):
        open_model(path, trust_remote_code=True)


def test_one_bad_prompt_is_named_and_nothing_runs(make: Make, open_model: Open) -> None:
    """As vLLM's `LLM` does. A server adds requests one by one: there only the bad one fails."""
    llm = open_model(make("BertModel")[0], max_model_len=64)
    with pytest.raises(UsageError, match=r"^prompt 1: token id 999 at position 1"):
        llm.embed([{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [5, 999]}, {"prompt_token_ids": []}])
    with pytest.raises(UsageError, match=r"^prompt 2: the prompt is empty"):
        llm.embed([{"prompt_token_ids": [5, 6]}, "x", {"prompt_token_ids": []}])
    assert not llm.engine.requests
    assert len(llm.embed("x", use_tqdm=False)) == 1


def test_texts_that_the_model_wants_as_conversations_are_refused(make: Make, open_model: Open) -> None:
    path, _ = make("BertModel")
    write(path, "sentence_bert_config.json", {"modality_config": {"text": {}, "message": {"format": "flat"}}})
    llm = open_model(path)
    with pytest.raises(UsageError, match="puts every text into its chat template first"):
        llm.embed("x")
    assert len(llm.embed({"prompt_token_ids": [5, 6]}, use_tqdm=False)) == 1


def test_parameters_without_effect_are_refused(make: Make, open_model: Open) -> None:
    embedder, classifier = (make(name)[0] for name in ("BertModel", "BertForSequenceClassification"))
    with pytest.raises(UsageError, match="use_activation would have no effect"):
        open_model(embedder).embed("x", PoolingParams(use_activation=False))
    with pytest.raises(UsageError, match="normalize would have no effect"):
        open_model(classifier).classify("x", PoolingParams(normalize=True))
    with pytest.raises(UsageError, match="embed was called with pooling parameters for the task score"):
        open_model(embedder).embed("x", PoolingParams(task="score"))
    with pytest.raises(UsageError, match="2 prompts and 1 pooling parameters"):
        open_model(embedder).embed(["x", "y"], [PoolingParams()])


def test_cross_encoder_equals_sentence_transformers(make: Make, open_model: Open) -> None:
    from sentence_transformers import CrossEncoder

    path, _ = make("BertForSequenceClassification", num_labels=1)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write(
        path, "config.json", {**config, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    )
    expected = CrossEncoder(str(path), device="cpu").predict([("the fox", text) for text in TEXTS])
    found = [output.score for output in open_model(path).score("the fox", TEXTS, use_tqdm=False)]
    assert max(abs(a - float(b)) for a, b in zip(found, expected, strict=True)) <= 1e-4
