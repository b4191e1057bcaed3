"""What a checkpoint says of pooling, and what an argument changes of it (BEHAVIOUR P1, P2; CASES 38). No torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelbay.args import EngineArgs
from modelbay.config.origins import Origins
from modelbay.errors import ConfigError, TrustError, UsageError
from modelbay.pooling import PoolingSpec, resolve_pooling
from modelbay.source import ModelFiles
from modelbay.trace import Trace

IDENTITY = "torch.nn.modules.linear.Identity"
POOLING = "1_Pooling/config.json"
OLD = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
DENSE = {"in_features": 64, "out_features": 32, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


def listed(*types: str) -> list[dict[str, str]]:
    found = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, name in enumerate(types, 1):
        kind = name if "." in name else f"sentence_transformers.models.{name}"
        found.append({"path": f"{index}_{name.rpartition('.')[2]}", "type": kind})
    return found


def spec(folder: Path, files: dict[str, Any], task: str = "embed", config: Any = None, **args: Any) -> PoolingSpec:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    names = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    raw = dict(config or {})
    facts: Any = SimpleNamespace(
        hidden_size=64, raw=raw, hf=None, get=lambda key, default=None: raw.get(key, default), origins=Origins()
    )
    found = resolve_pooling(
        ModelFiles(str(folder), "local", folder, names), facts, task, EngineArgs.create(str(folder), **args), Trace()
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        (OLD, ("mean",)),
        ({"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}, ("last",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"word_embedding_dimension": 64, "pooling_mode_cls_token": False}, ("mean",)),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}, ("last",)),
        ({"embedding_dimension": 64, "pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"embedding_dimension": 64, "pooling_mode": "cls", "pooling_mode_mean_tokens": True}, ("cls",)),
    ],
)  # fmt: skip
def test_p1_both_schemas_of_the_pooling_config(config: dict[str, Any], modes: tuple[str, ...], tmp_path: Path) -> None:
    assert spec(tmp_path, {"modules.json": listed("Pooling"), POOLING: config}).modes == modes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not JSON"),
        ({"pooling_mode": "median"}, "'median', which is not known; known: cls, max, mean"),
        ({"pooling_mode_median_tokens": True}, "has pooling_mode_median_tokens, which is not known"),
        ({"pooling_mode_mean_tokens": "yes"}, "which is neither true nor false"),
        ({"pooling_mode": 3}, "which is no name"),
        ({"word_embedding_dimension": 768, "pooling_mode_mean_tokens": True}, "vectors of 768 .* the model's have 64"),
        ({"word_embedding_dimension": "64"}, "which is no size"),
    ],
)  # fmt: skip
def test_p1_a_pooling_config_that_cannot_be_read_is_an_error(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(tmp_path, {"modules.json": listed("Pooling"), POOLING: config})


def test_p1_a_pooling_config_that_modules_json_names_and_is_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names the module '1_Pooling', and there is no 1_Pooling/config\.json"):
        spec(tmp_path, {"modules.json": listed("Pooling")})


def test_p1_argument_over_checkpoint_over_default(tmp_path: Path) -> None:
    files = {"modules.json": listed("Pooling"), POOLING: OLD}
    assert spec(tmp_path / "none", {"config.json": {}}).modes is None
    said = spec(tmp_path / "said", files)
    assert (said.modes, said.normalize) == (("mean",), False)
    asked = spec(tmp_path / "asked", files, pooler_config={"pooling_type": "CLS", "normalize": True, "dimensions": 8})
    assert (asked.modes, asked.normalize, asked.dimensions) == (("cls",), True, 8)


def test_p1_a_pooling_config_counts_without_modules_json_too(tmp_path: Path) -> None:
    assert spec(tmp_path, {POOLING: OLD}).modes == ("mean",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pooling": "mean"}, "pooler_config has no 'pooling'. Did you mean 'pooling_type'"),
        ({"pooling_type": "median"}, "must be one of cls, max, mean"),
        ({"normalize": 1}, "normalize must be true or false"),
        ({"dimensions": 0}, "dimensions must be a positive integer"),
        ({"activation": "sigmoid"}, "activation would have no effect here; it is for classifiers"),
    ],
)
def test_p1_an_argument_that_makes_no_sense_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        spec(tmp_path, {"config.json": {}}, pooler_config=given)


def test_case_38_scaling_that_comes_last_is_done_after_the_cut(tmp_path: Path) -> None:
    files = {"modules.json": listed("Pooling", "Dense", "Normalize"), POOLING: OLD, "2_Dense/config.json": DENSE}
    found = spec(tmp_path, files)
    assert [stage.kind for stage in found.stages] == ["dense"]
    assert found.normalize
    assert found.embedding_size(64, ("mean",)) == 32


def test_the_names_that_newer_versions_write_are_known(tmp_path: Path) -> None:
    entries = [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.base.modules.normalize.Normalize"},
    ]
    found = spec(tmp_path, {"modules.json": entries, POOLING: {"embedding_dimension": 64, "pooling_mode": "mean"}})
    assert (found.modes, found.stages, found.normalize) == (("mean",), (), True)


def test_p2_a_type_that_is_not_known_needs_trust(tmp_path: Path) -> None:
    files = {"modules.json": listed("Pooling", "custom_module.Scale"), POOLING: OLD}
    with pytest.raises(TrustError, match=r"has the module custom_module\.Scale, .* --trust-remote-code"):
        spec(tmp_path, files)
    found = spec(tmp_path, files, trust_remote_code=True)
    assert [(stage.kind, stage.reference) for stage in found.stages] == [("remote", "custom_module.Scale")]


@pytest.mark.parametrize("trust", [False, True])
def test_p2_a_module_of_the_library_that_is_not_served_is_refused_with_trust_too(trust: bool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has sentence_transformers\.models\.LSTM .* which is not served"):
        spec(
            tmp_path, {"modules.json": listed("LSTM", "Pooling"), "2_Pooling/config.json": OLD}, trust_remote_code=trust
        )


@pytest.mark.parametrize("value", ["[]", "{}", "[1]", '[{"type": "x"}]', "nothing"])
def test_p2_a_modules_json_that_is_no_list_of_modules_is_an_error(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"modules\.json"):
        spec(tmp_path, {"modules.json": value})


@pytest.mark.parametrize(
    ("config", "activation", "score"),
    [
        ({"num_labels": 1}, "sigmoid", "sigmoid"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "softmax", "identity"),
        ({}, "softmax", "identity"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid", "identity"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity", "sigmoid"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY}}, "identity", "identity"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": IDENTITY}, "identity", "identity"),
    ],
)  # fmt: skip
def test_p2_the_declared_activation(config: dict[str, Any], activation: str, score: str, tmp_path: Path) -> None:
    found = spec(tmp_path, {"config.json": {}}, "classify", config)
    assert (found.activation, found.score_activation) == (activation, score)


def test_p2_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    config = {"num_labels": 1, "sentence_transformers": {"activation_fn": "my.module.Act"}}
    with pytest.raises(ConfigError, match=r"names the activation 'my\.module\.Act', which is not known"):
        spec(tmp_path, {"config.json": {}}, "classify", config)
    with pytest.raises(ConfigError, match="problem_type 'ranking'; known: regression"):
        spec(tmp_path, {"config.json": {}}, "classify", {"problem_type": "ranking"})


def test_an_argument_replaces_the_activation(tmp_path: Path) -> None:
    for given, expected in (({"activation": "tanh"}, "tanh"), ({"use_activation": False}, "identity")):
        found = spec(tmp_path, {"config.json": {}}, "classify", {"num_labels": 3}, pooler_config=given)
        assert (found.activation, found.score_activation) == (expected, expected)


def test_prompts_and_their_default(tmp_path: Path) -> None:
    sentence = {"prompts": {"query": "Q: ", "document": None}, "default_prompt_name": "query"}
    found = spec(tmp_path / "a", {"config_sentence_transformers.json": sentence})
    assert (dict(found.prompts), found.default_prompt) == ({"query": "Q: ", "document": ""}, "query")
    with pytest.raises(ConfigError, match=r"default_prompt_name \['query'\], which is no name"):
        spec(tmp_path / "c", {"config_sentence_transformers.json": {**sentence, "default_prompt_name": ["query"]}})
    with pytest.raises(ConfigError, match="default_prompt_name 'other', and no such prompt"):
        spec(tmp_path / "b", {"config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": "other"}})


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_p1_the_config_of_the_transformer_module_by_new_and_old_names(name: str, tmp_path: Path) -> None:
    assert spec(tmp_path, {name: {"max_seq_length": 128, "do_lower_case": True}}).lower_case


@pytest.mark.parametrize(
    "config",
    [
        {"max_seq_length": 128, "do_lower_case": False},
        {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings", "unpad_inputs": True,
         "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}},
        {"model_args": {"trust_remote_code": True, "dtype": "float16"}, "tokenizer_args": {}, "config_args": None},
        {"processing_kwargs": {"image": {"size": 3}, "text": {}}, "query_length": None},
    ],
)  # fmt: skip
def test_p1_what_changes_nothing_for_texts_is_passed_over(config: dict[str, Any], tmp_path: Path) -> None:
    assert not spec(tmp_path, {"sentence_bert_config.json": config}).lower_case


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"query_length": 32}, "has query_length 32, which is not served"),
        ({"transformer_task": "fill-mask"}, "has transformer_task 'fill-mask', which is not served"),
        ({"tokenizer_name_or_path": "other/one"}, "has tokenizer_name_or_path 'other/one', which is not served"),
        ({"pool_twice": True}, "has pool_twice, which is not known here"),
        ({"config_args": {"num_hidden_layers": 3}}, "config_args has num_hidden_layers, which is not served"),
        ({"processing_kwargs": {"text": {"max_length": 8}}}, "processing_kwargs has text, which is not served"),
        ({"modality_config": {"text": {"method": "get_text_features"}}}, "has method 'get_text_features' for text"),
        ({"modality_config": {"text": {"method_output_name": ["hidden_states", -2]}}}, "has method_output_name"),
        ({"do_lower_case": "no"}, "neither true nor false"),
        ({"model_args": "x"}, "is no object"),
    ],
)  # fmt: skip
def test_p1_what_the_transformer_module_does_and_is_not_done_here_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(tmp_path, {"sentence_bert_config.json": config})
