"""Whatever is wrong with the input: one line that says what was found and what to do, and the right exit code."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelbay.cli.main import run
from modelbay_testing.hub import LocalHub
from modelbay_testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = ("--prompt", "The quick", "--max-tokens", "3")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a fault: one file of weights, 512 positions."""
    return tiny_checkpoint(tmp_path_factory.mktemp("good"), "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in five files with an index."""
    return tiny_checkpoint(tmp_path_factory.mktemp("sharded"), "llama", max_shard_size="100KB")


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(good, tmp_path / "model")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``code, stdout, stderr = cli("generate", …)`` in this process, with nobody's settings."""
    for variable in ("MODELBAY_PLUGINS", "MODELBAY_PREFER", "HF_TOKEN", "MODELBAY_ALLOW_LONG_MAX_MODEL_LEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def call(*argv: str | Path) -> tuple[int, str, str]:
        code = run(list(map(str, argv)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def refused(cli: Run) -> Callable[..., str]:
    """The one line that ``generate`` ends in; nothing on standard output, before it only the cache's size."""

    def call(*argv: str | Path, code: int = 1, command: str = "generate") -> str:
        found, out, err = cli(command, *argv)
        *before, line, end = err.split("\n")
        assert (found, out, end) == (code, "", ""), err
        assert all(text.startswith("KV cache: ") for text in before), err
        assert line.startswith("error: ")
        assert "Traceback" not in line
        assert "internal" not in line
        return line.removeprefix("error: ")

    return call


def words(value: list[str] | str) -> str:
    """The arguments alone name a test."""
    return " ".join(value) if isinstance(value, list) else ""


def change_config(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


# -- the reference and its files


def test_a_missing_path(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused(tmp_path / "nothing-here", *PROMPT)
    assert line == f"there is no path {tmp_path}/nothing-here. Check the path; {tmp_path} exists."
    assert "empty" in refused("", *PROMPT, code=2)


def test_an_empty_directory(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused(tmp_path, *PROMPT)
    assert line.startswith(f"{tmp_path} is a directory without config.json")
    assert "empty of files" in line


def test_a_file_that_is_not_a_model(refused: Callable[..., str], good: Path) -> None:
    assert f"Give its directory: {good}" in refused(good / "config.json", *PROMPT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "line 18, column 1: not JSON"),
        (b"", "line 1, column 1: not JSON"),
        (b"[1]", "a JSON object is needed, found list"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_a_truncated_config(refused: Callable[..., str], model: Path, content: bytes | None, message: str) -> None:
    if content is None:
        cut(model / "config.json", 0.5)
    else:
        (model / "config.json").write_bytes(content)
    line = refused(model, *PROMPT)
    assert str(model / "config.json") in line
    assert message in line


@pytest.mark.parametrize(
    ("keep", "message"),
    [(0.5, "truncated: its tensors need 427264 bytes, "), (0.001, "truncated"), (0.00001, "4 bytes long, too short")],
)
def test_truncated_safetensors(refused: Callable[..., str], model: Path, keep: float, message: str) -> None:
    cut(model / "model.safetensors", keep)
    line = refused(model, *PROMPT)
    assert f"weight file {model}/model.safetensors" in line
    assert message in line
    assert "Download it again" in line


def test_an_lfs_pointer_in_place_of_the_weights(refused: Callable[..., str], model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n")
    assert "Git LFS pointer" in refused(model, *PROMPT)


def test_a_missing_shard(refused: Callable[..., str], sharded: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sharded, tmp_path / "model")
    gone = sorted(model.glob("*-of-*.safetensors"))[1]
    gone.unlink()
    assert f"names files that are not there: {gone.name}." in refused(model, *PROMPT)


def test_no_weights(refused: Callable[..., str], model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "has no weights: looked for safetensors" in refused(model, *PROMPT)


def test_no_tokenizer(refused: Callable[..., str], model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert "no tokenizer files" in refused(model, *PROMPT)


def test_weights_of_another_model(refused: Callable[..., str], model: Path) -> None:
    change_weights(model, lambda tensors: tensors.update({"model.strange.weight": torch.zeros(3)}))
    assert "tensors that the model does not have: model.strange.weight" in refused(model, *PROMPT)
    change_weights(model, lambda tensors: (tensors.pop("model.strange.weight"), tensors.pop("model.norm.weight")))
    assert "no tensor for 1 of its parameters: model.norm.weight" in refused(model, *PROMPT)
    change_config(model, intermediate_size=96)
    assert "model.norm.weight" in refused(model, *PROMPT)
    assert "do not fit the model" in refused(model, *PROMPT, "--no-strict")


# -- what the config says


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "foo"}, "unknown model_type 'foo': neither transformers "),
        ({"model_type": None}, "the config has no model_type"),
        ({"model_type": "foo", "auto_map": {"AutoConfig": "c.Foo"}}, "trust_remote_code"),
        ({"quantization_config": {"quant_method": "frobnicate"}}, "is 'frobnicate', which no installed plugin offers"),
        ({"quantization_config": {"bits": 4}}, "quantization_config has no quant_method"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number, got 'big'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number, got -1"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type 'spiral' is not supported"),
        ({"num_hidden_layers": 3}, "no tensor for 9 of its parameters: model.layers.2."),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_served(
    refused: Callable[..., str], model: Path, values: dict[str, Any], message: str
) -> None:
    change_config(model, **values)
    assert message in refused(model, *PROMPT)


def test_an_unknown_architecture(refused: Callable[..., str], model: Path) -> None:
    change_config(model, architectures=["FooForCausalLM"])
    line = refused(model, *PROMPT, "--model-impl", "native")
    assert line.startswith("model_impl=native cannot build 'FooForCausalLM' (model_type 'llama'): native: no installed")


# -- arguments


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-tokens", "0"], "max_tokens must be an integer of at least 1, got 0."),
        (["--max-tokens", "-3"], "max_tokens must be an integer of at least 1, got -3."),
        (["--max-tokens", "many"], "'many' is not a valid integer"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or greater, got -1.0."),
        (["--temperature", "nan"], "temperature must be"),
        (["--top-p", "2"], "top_p must be in (0, 1], got 2.0."),
        (["--n", "0"], "n must be an integer of at least 1, got 0."),
        (["--n", "2", "--temperature", "0"], "n must be 1 when sampling is greedy"),
        (["--stop", ""], "stop must hold strings that are not empty"),
        (["--frobnicate"], "No such option '--frobnicate'"),
        (["--hf-overrides", "{"], "Invalid value for '--hf-overrides': not JSON"),
        (["--hf-overrides", "[1]"], "a JSON object was expected, got [1]"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size must be a positive integer, got 0."),
        (["--dtype", "float12"], "float32, bfloat16, float16"),
        (["--device", "banana"], "device 'banana' is not a torch device"),
        (["--device", "meta"], "device 'meta' is not supported; cpu and cuda are."),
        (["--kernels", "nonsense"], "kernels='nonsense' is not installed; installed kernel sets: "),
        (["--attention-backend", "nonsense"], "attention_backend='nonsense' is not installed"),
        (["--model-impl", "nonsense"], "unknown model_impl 'nonsense'; installed: auto, "),
        (["--max-model-len", "9999"], "max_model_len 9999 is more than the model's 512"),
        (["--max-model-len", "0"], "max_model_len must be a positive integer, got 0."),
        (["--distributed-timeout-seconds", "1e300"], "at most 1,000,000, got 1e+300."),
        (["--gpu-memory-utilization", "7"], "gpu_memory_utilization must be in (0, 1], got 7.0."),
        (["--generation-config", "/nothing/here"], "generation_config '/nothing/here' has no generation_config.json"),
        (["--runner", "pooling"], "which generates no text"),
        (["--load-format", "nonsense"], "no installed plugin offers the load format 'nonsense'"),
        (["--tokenizer-mode", "nonsense"], "no installed plugin offers the tokenizer_mode 'nonsense'. Offered: "),
        (["--hf-overrides", '{"hiden_size": 3}'], "unknown config key 'hiden_size'. Did you mean 'hidden_size'?"),
        (["--quantization", "nonsense"], "no installed plugin offers the quantization method 'nonsense'"),
        (["--quantization", "gguf"], "quantization='gguf', but the checkpoint is not quantised: its config has no"),
        (["--system", "Be brief."], "--system is a message of a conversation: it needs --chat."),
    ],
    ids=words,
)
def test_an_argument_that_makes_no_sense_is_exit_code_2(
    refused: Callable[..., str], good: Path, argv: list[str], message: str
) -> None:
    assert message in refused(good, "--prompt", "The quick", *argv, code=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--load-format", "pt"], "has no .bin, .pt or .pth weight files"),
        (["--tokenizer", "/nothing/here"], "there is no path /nothing/here"),
        (["--kv-cache-memory-bytes", "10"], "no room for the KV cache: 10 bytes"),
        (
            ["--kv-cache-memory-bytes", "16384", "--max-model-len", "512"],
            "needs 32 cache blocks for one sequence, and 1 fit",
        ),
    ],
    ids=words,
)
def test_an_argument_that_does_not_fit_what_is_there(
    refused: Callable[..., str], good: Path, argv: list[str], message: str
) -> None:
    assert message in refused(good, *PROMPT, *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(refused: Callable[..., str], good: Path) -> None:
    assert "torch sees no CUDA device. Use --device cpu." in refused(good, *PROMPT, "--device", "cuda", code=2)


def test_no_prompt_and_no_model(refused: Callable[..., str], good: Path) -> None:
    assert "no prompt was given" in refused(good, code=2)
    assert "Missing argument 'MODEL'" in refused(code=2)


# -- prompts and what becomes of them


def test_a_prompt_longer_than_the_model(refused: Callable[..., str], good: Path) -> None:
    line = refused(good, "--prompt", "The quick " * 600, code=2)
    assert line.startswith("the prompt has 1801 tokens; with max_model_len=512 at most 511 leave room for output.")


def test_an_empty_prompt(refused: Callable[..., str], cli: Run, model: Path) -> None:
    """With a BOS token it is a prompt of one token; without one there is nothing to continue from."""
    assert cli("generate", model, "--prompt", "", "--max-tokens", "2")[0] == 0
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert refused(model, "--prompt", "", code=2) == "the prompt is empty: there is no token to continue from."


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_chat_without_a_template(command: str, refused: Callable[..., str], model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    argv = [*PROMPT, "--chat"] if command == "generate" else []
    assert refused(model, *argv, command=command).startswith("the tokenizer has no chat template")


def test_nan_logits(refused: Callable[..., str], model: Path) -> None:
    change_weights(model, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    line = refused(model, *PROMPT)
    assert line.startswith("the model's logits are not usable for request '0' (nan); no token was chosen.")


# -- the disk


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELBAY_CACHE", str(tmp_path / "modelbay-cache"))
    with LocalHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_disk_that_fills_up_while_downloading(
    refused: Callable[..., str], cli: Run, hub: LocalHub, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is left that looks complete, and the next try, with room, succeeds."""
    hub.repo("org/name").commit({path.name: path.read_bytes() for path in good.iterdir()})
    from huggingface_hub import file_download

    get = file_download.http_get

    def full(url: str, temp_file: Any, **kwargs: Any) -> None:
        if "model.safetensors" not in url:
            return get(url, temp_file, **kwargs)
        temp_file.write(b"the first bytes")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", full)
        line = refused("org/name", *PROMPT)
    assert "disk is full: model.safetensors of org/name" in line
    assert str(tmp_path) in line
    code, out, _ = cli("generate", "org/name", *PROMPT)
    assert (code, len(out.splitlines())) == (0, 1)
