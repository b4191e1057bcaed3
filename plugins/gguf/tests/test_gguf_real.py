"""SmolLM2-135M-Instruct as people download it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelbay.rope import RopeSpec
from modelbay.trace import Trace
from modelbay.weights.names import make_pieces
from modelbay_gguf.config import read_config
from modelbay_gguf.names import transforms
from modelbay_gguf.tokenizer import load
from modelbay_gguf.weights import Gguf
from modelbay_testing.assets import or_skip, smollm2_gguf
from modelbay_testing.records import apply_piece

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def path() -> Path:
    return or_skip(smollm2_gguf)


def test_w4_every_tensor_is_what_transformers_reads(path: Path, files_of: Callable[..., Any]) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = model.state_dict()
    raw = read_config(path)
    facts: Any = SimpleNamespace(
        model_type=raw["model_type"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        hidden_size=raw["hidden_size"],
        rope={"default": RopeSpec("default", 100000.0, 64)},
    )
    with Gguf().open(files_of(path), facts, None) as source:  # type: ignore[arg-type]
        pieces = make_pieces(source.entries(), transforms(facts), facts)
        assert {piece.name for piece in pieces} == expected.keys() - {"lm_head.weight"}
        assert len(pieces) == 272
        for piece in pieces:
            assert torch.equal(apply_piece(piece, source.read(piece.source)), expected[piece.name]), piece.name
            source.release(piece.source)


def test_t1_ids_are_those_of_transformers_with_digits_apart(path: Path, files_of: Callable[..., Any]) -> None:
    """The file says that digits are split apart, as the model's own tokenizer.json does; Transformers' reader of GGUF
    does not know that, and is told here."""
    from tokenizers import pre_tokenizers as pre
    from transformers import AutoTokenizer

    found = load(files_of(path), SimpleNamespace(model_type="llama"), None, Trace())  # type: ignore[arg-type]
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert type(found) is type(expected)
    assert found("def f(x):\n  10").input_ids != expected("def f(x):\n  10").input_ids
    pieces = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    expected.backend_tokenizer.pre_tokenizer = pre.Sequence(pieces)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert found.apply_chat_template(messages, tokenize=False) == expected.apply_chat_template(messages, tokenize=False)
    for text in ("Hello  world 123", "<|im_start|>user\n한국어<|im_end|>", "def f(x):\n\treturn x"):
        assert found(text).input_ids == expected(text).input_ids
