"""What code fills in on the user's behalf keeps its true source: the checkpoint, the config file, a lock file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelbay import hookimpl
from modelbay.resolve import Resolution, resolve
from modelbay.specs import ArchSpec, BackendSpec
from modelbay.trace import Trace

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
POOLING = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
MODULES = [
    {"type": f"sentence_transformers.models.{name}", "path": path}
    for name, path in (("Transformer", ""), ("Pooling", "1_Pooling"))
]


class Willing:
    """A backend that builds anything."""

    def assess(self, *_: Any) -> Any:
        from modelbay.backends import Verdict

        return Verdict(True, "it builds anything")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resolution]:
    """``ask({name: content}, **engine arguments)``: the resolution of a directory with these files."""
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    plugin = ModuleType("acme")
    archs = [ArchSpec(name="LlamaForCausalLM", target="nowhere:Model")]
    plugin.register_architectures = hookimpl(lambda: archs, specname="register_architectures")  # type: ignore[attr-defined]
    backends = [BackendSpec(name="native", target=f"{__name__}:Willing")]
    plugin.register_modeling_backends = hookimpl(  # type: ignore[attr-defined]
        lambda: backends, specname="register_modeling_backends"
    )

    def run(files: dict[str, Any], **kwargs: Any) -> Resolution:
        for name, content in {"config.json": LLAMA, **files}.items():
            path = tmp_path / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        return resolve(str(tmp_path / "model"), plugins=["core", plugin], **kwargs)

    return run


def _of_arguments(trace: Trace) -> list[str]:
    """Questions that an argument is said to have answered, but for the plugins, which each test gives."""
    return [decision.question for decision in trace if "argument" in decision.source and decision.question != "loaded"]


def _source(trace: Trace, question: str) -> str:
    decision = trace.find(question)
    assert decision is not None, question
    return decision.source


def test_p1_a_checkpoint_made_to_embed_is_the_source_of_its_task(ask: Callable[..., Resolution]) -> None:
    found = ask({"modules.json": MODULES, "1_Pooling/config.json": POOLING})
    said = "modules.json (sentence_transformers.models.Pooling)"
    assert found.task == "embed"
    assert (_source(found.trace, "task"), _source(found.trace, "conversion")) == (said, said)
    assert _of_arguments(found.trace) == []


@pytest.mark.parametrize(
    ("kwargs", "source"),
    [
        ({"convert": "embed"}, "argument convert=embed"),
        ({"runner": "pooling"}, "argument runner=pooling"),
        ({"runner": "generate"}, "argument runner=generate"),
    ],
)
def test_an_argument_that_was_given_is_the_source_of_the_task(
    kwargs: dict[str, str], source: str, ask: Callable[..., Resolution]
) -> None:
    found = ask({"modules.json": MODULES, "1_Pooling/config.json": POOLING}, **kwargs)
    assert _source(found.trace, "task") == source


def test_the_config_file_is_the_source_of_what_its_arguments_decide(
    ask: Callable[..., Resolution], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        '[args]\nmax-model-len = 32\ndtype = "bfloat16"\nrunner = "pooling"\nmodel_impl = "native"\n'
        'pooler_config = {normalize = false}\nhf_overrides = {num_hidden_layers = 1}\ngeneration_config = "modelbay"\n'
    )
    monkeypatch.setenv("MODELBAY_CONFIG", str(path))
    found = ask({})
    trace, sources = found.trace, found.config.sources
    assert sources["max_model_len"] == f"[args] max_model_len in {path}"
    assert sources["dtype"] == f"[args] dtype in {path}"
    assert sources["num_layers"] == f"[args] hf_overrides in {path} (num_hidden_layers)"
    assert _source(trace, "task") == f"[args] runner in {path}"
    assert _source(trace, "normalize") == f"[args] pooler_config in {path}"
    assert _source(trace, "backend") == f"model_impl=native ([args] model_impl in {path})"
    assert f"[args] generation_config in {path}" in _source(trace, "default sampling")
    assert _of_arguments(trace) == []
    given = ask({}, dtype="float16")
    assert given.config.sources["dtype"] == "argument dtype"


def test_a_lock_is_the_source_of_what_it_pins() -> None:
    from modelbay.args import EngineArgs
    from modelbay.lock import Lock

    trace = Trace()
    data: dict[str, Any] = {
        "args": {"dtype": "bfloat16"},
        "model": {"repository": "a", "commit": "c"},
        "tokenizer": None,
        "code": [],
    }
    args = Lock(data).pin(EngineArgs(model="/local", locked="my.lock"), trace)
    assert args.dtype == "bfloat16"
    assert trace.argument("dtype") == "my.lock, by argument locked"
    assert trace.argument("max_model_len") == "argument max_model_len"
