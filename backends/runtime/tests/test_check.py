"""`modelbay check`: the verdict equals what a start would do, in numbers and in words, and needs no weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay.cli.main import run
from modelbay.errors import ModelbayError
from modelbay_runtime.check import check_model
from modelbay_runtime.parallel.sizes import TensorParallelSize, split_over, tensor_parallel_sizes
from modelbay_testing.hub import LocalHub

SMALL = {"device": "cpu", "max_num_seqs": 4}


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def kinds(report: Any) -> list[str]:
    return [missing.kind for missing in report.missing]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mistral-window"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_it_says_is_what_a_start_does(checkpoint: Callable[[str], Path], name: str, dtype: str) -> None:
    arguments: dict[str, Any] = {**SMALL, "dtype": dtype, "kernels": "torch"}
    report = check_model(str(checkpoint(name)), arguments)
    assert report.runs, report.missing
    with LLM(str(checkpoint(name)), **arguments) as llm:
        engine, need = llm.engine, report.memory
        assert need is not None
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.model.parameters()}
        assert need.weights == sum(storages.values())
        assert need.max_model_len == engine.max_model_len
        assert need.sequences == 4
        assert report.resolution["backend"] == llm.resolution.backend  # type: ignore[index]
        assert report.weights["tensors"] == len(llm.load_report.tensors)  # type: ignore[index]
        config = llm.resolution.config
        row = 2 * config.num_kv_heads * config.head_size * (4 if dtype == "float32" else 2)
        assert need.cache_per_token == row * config.num_layers
        assert need.cache_per_sequence >= need.cache_per_token * min(need.max_model_len or 0, 20)


def test_too_large_a_model_is_refused_with_the_numbers_and_without_its_weights(model: Path) -> None:
    edit(model, hidden_size=65536, intermediate_size=262144, num_hidden_layers=200, num_attention_heads=512)
    edit(model, num_key_value_heads=64, head_dim=128)
    (model / "model.safetensors").unlink()
    report = check_model(str(model), {**SMALL, "load_format": "dummy"})
    assert kinds(report) == ["memory"]
    assert report.memory is not None
    assert report.memory.weights > 10 * 2**40
    assert f"weights ({report.memory.weights:,} bytes)" in report.missing[0].message
    assert 64 in [size.size for size in report.tensor_parallel_sizes]


def test_little_room_shortens_the_sequence_as_the_engine_does(model: Path) -> None:
    edit(model, max_position_embeddings=4096)
    arguments = {**SMALL, "kv_cache_memory_bytes": 400_000}
    report = check_model(str(model), arguments)
    assert report.runs
    with LLM(str(model), **arguments) as llm:
        assert report.memory.max_model_len == llm.engine.max_model_len < 4096  # type: ignore[union-attr]
    report = check_model(str(model), {**arguments, "max_model_len": 4096})
    assert kinds(report) == ["memory"]
    with pytest.raises(ModelbayError) as caught:
        LLM(str(model), **arguments, max_model_len=4096)
    assert caught.value.message == report.missing[0].message  # type: ignore[attr-defined]


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")


def code_config(folder: Path) -> None:
    edit(folder, model_type="brook", auto_map={"AutoConfig": "conf.Conf"})
    (folder / "conf.py").write_text("raise RuntimeError('it ran')\n")


@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (lambda folder: edit(folder, architectures=["Brook"], model_type="brook"), "config", "unknown model_type"),
        (lambda folder: edit(folder, quantization_config={"quant_method": "magic"}), "config", "'magic'"),
        (code_config, "trust", "is not trusted"),
        (lambda folder: (folder / "model.safetensors").unlink(), "file", "has no weights"),
        (lfs_pointer, "file", "LFS pointer"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "file", "tokenizer"),
        (lambda folder: (folder / "config.json").unlink(), "file", "config.json"),
    ],
)
def test_what_is_missing_is_named_by_kind(
    model: Path, damage: Callable[[Path], Any], kind: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(model)
    code = run(["check", str(model), "--json", "--device", "cpu"])
    verdict = json.loads(capsys.readouterr().out)
    assert (code, verdict["runs"]) == (1, False)
    assert [missing["kind"] for missing in verdict["missing"]] == [kind]
    assert said in verdict["missing"][0]["message"]
    with pytest.raises(ModelbayError) as caught:
        LLM(str(model), device="cpu")
    assert caught.value.message == verdict["missing"][0]["message"]


@pytest.mark.parametrize("load_format", ["pt", "gguf"])
def test_w1_a_named_format_without_files_is_a_no(
    model: Path, load_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_model(str(model), {**SMALL, "load_format": load_format})
    assert (kinds(report), report.exit_code) == (["file"], 1)
    with pytest.raises(ModelbayError) as caught:
        LLM(str(model), **SMALL, load_format=load_format)
    assert caught.value.message == report.missing[0].message  # type: ignore[attr-defined]
    assert run(["explain", str(model), "--device", "cpu", "--load-format", load_format]) == 0
    assert f"! weights: cannot be loaded  [{report.missing[0].message}" in capsys.readouterr().out
    assert check_model(str(model), {**SMALL, "load_format": "dummy"}).runs


def test_w2_an_index_that_decides_against_a_whole_checkpoint_is_a_warning_of_check_explain_and_a_start(
    model: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other numbers in the file that Transformers would read: what runs is what the index names."""
    from safetensors.torch import load_file, save_file

    state = load_file(model / "model.safetensors")
    save_file(state, model / "model-00001-of-00001.safetensors")
    mapping = dict.fromkeys(state, "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    save_file({name: value.flip(0).contiguous() for name, value in state.items()}, model / "model.safetensors")
    said = "files: model-00001-of-00001.safetensors, not model.safetensors"
    report = check_model(str(model), SMALL)
    assert report.runs
    assert [one.rejected[0].option for one in report.trace.warnings()] == ["model.safetensors"]
    assert run(["explain", str(model), "--device", "cpu"]) == 0
    assert f"! {said}" in capsys.readouterr().out
    with LLM(str(model), **SMALL, dtype="float32", kernels="torch") as llm:
        found = llm.engine.model.state_dict()["model.norm.weight"]
        assert found.equal(state["model.norm.weight"].float())
    assert [message for message in caplog.messages if message.startswith(said)]


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 2}, {"max_new_tokens": 0}, {"top_k": 1.5}])
def test_c10_a_default_that_no_request_could_ask_for_is_a_no(model: Path, values: dict[str, Any]) -> None:
    (model / "generation_config.json").write_text(json.dumps(values))
    report = check_model(str(model), SMALL)
    assert (kinds(report), report.exit_code) == (["config"], 1)
    with LLM(str(model), **SMALL) as llm, pytest.raises(ModelbayError) as caught:
        llm.generate("x")
    assert caught.value.message == report.missing[0].message  # type: ignore[attr-defined]
    assert check_model(str(model), {**SMALL, "generation_config": "modelbay"}).runs
    assert check_model(str(model), {**SMALL, "runner": "pooling", "convert": "embed"}).runs, "nothing is sampled"


def test_c10_do_sample_false_alone_is_greedy(model: Path) -> None:
    (model / "generation_config.json").write_text('{"do_sample": false, "top_k": 50}')
    with LLM(str(model), **SMALL, seed=1) as llm:
        plain = llm.generate("the dog")[0].outputs[0].token_ids
        greedy = llm.generate("the dog", SamplingParams(temperature=0))[0].outputs[0].token_ids
    assert plain == greedy


def test_several_things_are_said_at_once(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    assert kinds(check_model(str(model), SMALL)) == ["file", "file"]


def test_a_missing_plugin_is_named(model: Path) -> None:
    report = check_model(str(model), {**SMALL, "load_format": "gguf", "plugins": ["runtime", "llama"]})
    assert kinds(report) == ["plugin"]
    assert "gguf" in report.missing[0].message


def test_a_model_on_the_hub_is_judged_without_downloading_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with LocalHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        files = {path.name: path.read_bytes() for path in checkpoint("llama").iterdir() if path.is_file()}
        hub.repo("org/model").commit(files)
        report = check_model("org/model", SMALL)
        assert report.runs, report.missing
        assert "model.safetensors" not in hub.downloads()
        size = len(files["model.safetensors"])
        found = {"load_format": "safetensors", "files": ["model.safetensors"], "tensors": None}
        assert report.weights == {**found, "bytes": size, "to_download": size}


def test_the_command_says_yes_in_words_and_by_its_exit_code(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(model), "--device", "cpu", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{model}: yes, it runs here\n")
    assert "  backend: native (LlamaForCausalLM, modelbay-llama 0.1.0), to generate\n" in out
    assert " in bfloat16 on cpu\n" in out
    assert "  tensor parallel sizes: 1, 2, 4 (2 copies of each KV head)\n" in out
    (model / "tokenizer.json").unlink()
    assert run(["check", str(model), "--device", "cpu"]) == 1
    assert f"{model}: no, it does not run here\n  missing file: " in capsys.readouterr().out
    assert run(["check", str(model), "--max-num-seqs", "0"]) == 2


# -- sizes


def facts(**values: Any) -> Any:
    named = {"num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000, "intermediate_size": 11008, **values}
    more = named.pop("more", {})
    return SimpleNamespace(**named, get=lambda key, default=None: more.get(key, default))


def test_case_32_kv_heads_below_the_size_are_replicated_and_the_vocabulary_is_padded() -> None:
    assert split_over(facts(num_kv_heads=4), 8) == TensorParallelSize(8, 4, 1, 2, 4000, 0)
    padded = split_over(facts(num_heads=48, num_kv_heads=6, vocab_size=151552, intermediate_size=13824), 6)
    assert padded == TensorParallelSize(6, 8, 1, 1, 25259, 2)
    assert str(padded) == "6 (vocabulary padded by 2)"


@pytest.mark.parametrize(
    ("values", "size", "said"),
    [
        ({}, 3, "num_attention_heads 32"),
        ({"intermediate_size": 11009}, 2, "intermediate_size 11009"),
        ({"more": {"moe_intermediate_size": 1407}}, 2, "moe_intermediate_size 1407"),
        ({"num_heads": 24, "num_kv_heads": 8}, 12, "num_key_value_heads 8 and 12"),
    ],
)
def test_what_does_not_divide_is_named(values: dict[str, Any], size: int, said: str) -> None:
    if size == 12:
        values = {**values, "intermediate_size": 12 * 100}
    assert said in str(split_over(facts(**values), size))


def test_all_sizes_that_divide() -> None:
    assert [size.size for size in tensor_parallel_sizes(facts())] == [1, 2, 4, 8, 16, 32]
    assert [
        size.size for size in tensor_parallel_sizes(facts(num_heads=9, num_kv_heads=3, intermediate_size=1536))
    ] == [1, 3]
    assert tensor_parallel_sizes(facts(num_heads=0, num_kv_heads=0)) == []


# -- weights against the config, without loading them


def dropped(folder: Path, *names: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if name not in names}, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: edit(folder, intermediate_size=96), "tensors do not fit the model: model.layers.0.mlp"),
        (lambda folder: edit(folder, vocab_size=300), "do not fit the model: "),
        (lambda folder: edit(folder, num_hidden_layers=9), "no tensor for"),
        (lambda folder: dropped(folder, "model.norm.weight"), "no tensor for 1 of its parameters: model.norm.weight"),
        (lambda folder: edit(folder, attention_bias=True), "q_proj.bias"),
    ],
    ids=["width", "vocabulary", "layers", "absent", "bias"],
)
def test_weights_that_do_not_fit_the_config_are_seen_without_loading(
    model: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], said: str
) -> None:
    damage(model)
    with monkeypatch.context() as patch:
        patch.setattr("modelbay.weights.safetensors.SafetensorsSource.read", lambda *args: pytest.fail("it was read"))
        report = check_model(str(model), SMALL)
    assert kinds(report) == ["file"]
    assert said in report.missing[0].message
    assert report.exit_code == 1
    with pytest.raises(ModelbayError) as caught:
        LLM(str(model), **SMALL)
    assert caught.value.message == report.missing[0].message  # type: ignore[attr-defined]


def test_layers_that_the_config_leaves_out_are_a_warning_of_check_and_of_a_start(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(model, num_hidden_layers=1)
    report = check_model(str(model), SMALL)
    assert report.runs, report.missing
    said = (
        "layer beyond num_hidden_layers: 9 tensors not used [num_hidden_layers = 1 (config.json (num_hidden_layers))]"
    )
    assert said in caplog.messages
    [warning] = [one for one in report.trace.warnings() if one.question == "layer beyond num_hidden_layers"]
    assert warning.answer == "9 tensors not used"
    caplog.clear()
    with LLM(str(model), **SMALL) as llm:
        assert warning in llm.resolution.trace.warnings()
    assert said in caplog.messages


# -- the second form of a tied head


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama-tied", True)])
def test_w7_the_packed_copy_of_a_tied_head_is_counted(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, tied: bool
) -> None:
    from modelbay_runtime.kernels.ops import Linear

    plain = check_model(str(checkpoint(name)), {**SMALL, "kernels": "torch"}).memory
    assert plain is not None
    assert plain.copies == 0
    monkeypatch.setattr(Linear, "pack", staticmethod(lambda weight: weight.clone()))
    report = check_model(str(checkpoint(name)), {**SMALL, "kernels": "torch"})
    config = json.loads((checkpoint(name) / "config.json").read_text())
    head = config["vocab_size"] * config["hidden_size"] * 4
    assert report.memory is not None
    assert report.memory.copies == (head if tied else 0)
    assert report.memory.weights == plain.weights + report.memory.copies
    with LLM(str(checkpoint(name)), **SMALL, kernels="torch") as llm:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in llm.engine.model.parameters()}
        assert report.memory.weights == sum(storages.values())


# -- exit codes


@pytest.mark.parametrize(
    ("argv", "kind", "code"),
    [
        (["--load-format", "nonsense"], "plugin", 2),
        (["--tokenizer-mode", "nonsense"], "plugin", 2),
        (["--quantization", "nonsense"], "plugin", 2),
        (["--quantization", "gguf"], "argument", 2),
        (["--model-impl", "nonsense"], "argument", 2),
        (["--kernels", "nonsense"], "argument", 2),
        (["--dtype", "nonsense"], "argument", 2),
        (["--hf-overrides", '{"hiden_size": 3}'], "argument", 2),
        (["--max-model-len", "99999"], "argument", 2),
        (["--hf-overrides", '{"hidden_act": "nonsense"}'], "plugin", 1),
    ],
)
def test_no_because_of_an_argument_is_exit_code_2(
    model: Path, capsys: pytest.CaptureFixture[str], argv: list[str], kind: str, code: int
) -> None:
    assert run(["check", str(model), "--json", "--device", "cpu", *argv]) == code
    verdict = json.loads(capsys.readouterr().out)
    assert kind in [missing["kind"] for missing in verdict["missing"]]


def test_no_because_of_an_argument_and_of_the_model_is_exit_code_1(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert run(["check", str(model), "--load-format", "nonsense", "--device", "cpu"]) == 1, "and not of it alone"
