"""What a model cannot do is refused before its weights are read: these checkpoints have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from modelbay.errors import ModelbayError
from modelbay_runtime.cli import bench, chat, embed, generate, score

COMMON = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
BERT = {"model_type": "bert", "architectures": ["BertModel"], **COMMON}
CLASSIFIER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **COMMON}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **COMMON}
UNPOOLED = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 64, "d_model": 16,
            "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32, "is_encoder_decoder": True}  # fmt: skip
COMMANDS: dict[str, tuple[Any, list[str]]] = {
    "generate": (generate.command, ["--prompt", "hi"]),
    "chat": (chat.command, []),
    "bench": (bench.command, ["--shapes", "1x4+1"]),
    "score": (score.command, ["query", "--documents", "-"]),
    "embed": (embed.command, []),
}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The message with which a command refuses a checkpoint without weights; opening an engine fails the test."""
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def engine(*_: object) -> None:
        pytest.fail("an engine was opened")

    monkeypatch.setattr("modelbay_runtime.llm.Engine", engine)

    def run(name: str, config: dict[str, Any], *extra: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        command, arguments = COMMANDS[name]
        result = CliRunner().invoke(command, [str(tmp_path), *arguments, "--device", "cpu", *extra], input="a\n")
        assert isinstance(result.exception, ModelbayError), result.output
        return str(result.exception)

    return run


@pytest.mark.parametrize("name", ["generate", "chat", "bench"])
def test_text_of_an_encoder_names_the_commands_that_it_serves(name: str, refused: Callable[..., str]) -> None:
    message = refused(name, BERT)
    assert "BertModel was resolved for embed, which generates no text." in message
    assert "modelbay embed" in message
    assert "LLM.encode" in message


def test_text_of_a_classifier_names_score(refused: Callable[..., str]) -> None:
    assert "modelbay score (LLM.score, LLM.classify)" in refused("generate", CLASSIFIER)


def test_text_of_a_causal_model_that_was_made_to_pool_names_the_argument(refused: Callable[..., str]) -> None:
    assert "--runner generate" in refused("generate", LLAMA, "--runner", "pooling")


def test_scores_of_a_model_that_generates(refused: Callable[..., str]) -> None:
    assert "resolved to generate, and embed was asked of it" in refused("score", LLAMA)


def test_vectors_of_a_model_that_cannot_give_them(refused: Callable[..., str]) -> None:
    assert "T5ForConditionalGeneration" in refused("embed", UNPOOLED)


def test_every_command_that_a_refusal_names_exists() -> None:
    from modelbay_runtime.plugin import register_commands

    assert {"embed", "score"} <= {spec.name for spec in register_commands()}
