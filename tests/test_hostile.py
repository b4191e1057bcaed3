"""Input that no honest caller or checkpoint brings: refused by name, never a traceback, a hang or another's tokens."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelbay import LLM, SamplingParams
from modelbay.cli.main import run
from modelbay.errors import ModelbayError, UsageError
from modelbay_testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = "\ud83d"  # of an emoji: what a string holds whose bytes were not UTF-8
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("good"), "llama")


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(good, tmp_path / "model")


@pytest.fixture(scope="module")
def llm(good: Path) -> Iterator[LLM]:
    with LLM(str(good), dtype="float32", kv_cache_memory_bytes=2_000_000) as llm:
        yield llm


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The one line that ``generate`` ends in."""
    for variable in ("MODELBAY_PLUGINS", "MODELBAY_PREFER", "MODELBAY_ALLOW_LONG_MAX_MODEL_LEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def call(model: Path, *argv: str, code: int = 1) -> str:
        found = run(["generate", str(model), "--prompt", "The quick", "--max-tokens", "3", *argv])
        out, err = capsys.readouterr()
        said = ("KV cache: ", "warning: ids beyond the model")
        lines = [line for line in err.splitlines() if not line.startswith(said)]
        assert (found, out, len(lines)) == (code, "", 1), err
        assert lines[0].startswith("error: ")
        assert "internal" not in lines[0]
        return lines[0].removeprefix("error: ")

    return call


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def greedy(max_tokens: int = 5, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **values)


def text_of(llm: LLM, prompt: Any = "The quick") -> str:
    return llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0].text


# -- threads, and streams that end early


def test_one_llm_in_many_threads(llm: LLM) -> None:
    """Each gets its own requests' tokens, whoever computes the steps."""
    prompts = [word * (i + 1) for i, word in enumerate(("The ", "quick ", "brown ", "fox ", "jumps ", "over "))]
    alone = [text_of(llm, prompt) for prompt in prompts]
    found: list[Any] = [None] * len(prompts)

    def work(index: int) -> None:
        try:
            for _ in range(5):
                found[index] = text_of(llm, prompts[index])
                assert found[index] == alone[index]
                list(llm.stream(prompts[index], greedy()))
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == alone
    assert not llm.engine.requests


def test_a_stream_that_is_collected_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may close it anywhere: its blocks stay until the step that uses them is over."""
    alone = text_of(llm)
    streams = [llm.stream("The quick", greedy(400, ignore_eos=True))]
    next(streams[0])
    forward = llm.engine.runner.run

    def run_and_collect(scheduled: Any) -> Any:
        streams.clear()
        gc.collect()
        return forward(scheduled)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", run_and_collect)
        assert text_of(llm) == alone
    assert not llm.engine.requests


def test_streams_that_nobody_finishes(llm: LLM) -> None:
    alone = text_of(llm)
    left = llm.stream("The quick", greedy(100, ignore_eos=True))
    next(left)
    left.close()
    llm.stream("The quick", greedy(100))  # never started
    half = llm.stream("The quick", greedy(20, ignore_eos=True))
    next(half)
    assert text_of(llm) == alone  # between two steps of another
    assert len(list(half)[-1].outputs[0].token_ids) == 20
    assert not llm.engine.requests


def test_outputs_pickle(llm: LLM) -> None:
    outputs = llm.generate(["The quick"], greedy(logprobs=5, prompt_logprobs=2), use_tqdm=False)
    assert pickle.loads(pickle.dumps(outputs)) == outputs


# -- prompts and parameters


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (HALF, "the prompt is not text: character 0 is half of one"),
        (b"bytes", "a prompt is a string, a mapping or a list of them, got bytes"),
        ([b"bytes"], "a prompt is a string or a list of token ids, got bytes"),
        ([[1, 2**70]], "outside the model's vocabulary"),
        ([[True]], "token ids must be integers, got True"),
        ({"prompt": 5}, "a prompt is a string or a list of token ids, got int"),
    ],
    ids=repr,
)
def test_what_is_no_prompt(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(prompt, greedy(), use_tqdm=False)


def test_what_are_no_parameters(llm: LLM) -> None:
    for params in ({"max_tokens": 3}, [5], 5):
        with pytest.raises(UsageError, match="sampling parameters are SamplingParams"):
            llm.generate(["The"], params, use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="sampling parameters are SamplingParams"):
            list(llm.stream("The", params))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="n must be at most 16384"):
        SamplingParams(n=10**9)
    for name in ("stop", "bad_words"):
        with pytest.raises(UsageError, match=f"{name} must hold text"):
            SamplingParams(**{name: HALF})


def test_a_top_k_beyond_every_vocabulary_is_all(llm: LLM) -> None:
    texts = [
        llm.generate(["The"], SamplingParams(seed=1, max_tokens=8, top_k=top_k), use_tqdm=False)[0].outputs[0].text
        for top_k in (256, 10**30)
    ]
    assert texts[0] == texts[1]


def test_what_is_no_conversation(llm: LLM) -> None:
    message = {"role": "user", "content": "The"}
    with pytest.raises(UsageError, match="messages must be a list, got int"):
        llm.chat(5, greedy())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="chat_template must be a template"):
        llm.chat([message], greedy(), chat_template=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="half of one"):
        llm.chat([{**message, "content": HALF}], greedy())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"trust_remote_code": "no"}, "trust_remote_code must be true or false, got 'no'"),
        ({"strict": "no"}, "strict must be true or false"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization must be a number"),
        ({"tokenizer": 5}, "tokenizer must be a string"),
        ({"dtype": 5}, "dtype must be auto"),
        ({"plugins": 5}, "plugins must be a list"),
        ({"prefer": 5}, "prefer must be a mapping"),
        ({"model": None}, "the model must be a directory, a file or a hub id, got None"),
        ({"model": "a" * 5000}, "a reference of 5000 characters is neither a path nor a hub id"),
        ({"model": "a/" * 2500}, "a reference of 5000 characters is neither a path nor a hub id"),
    ],
    ids=repr,
)
def test_an_engine_argument_of_another_type(good: Path, kwargs: dict[str, Any], message: str) -> None:
    """A string that happens to be true must not switch trust on."""
    with pytest.raises(ModelbayError, match=message):
        LLM(**{"model": str(good), **kwargs})


# -- configs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rms_norm_eps": float("inf")}, "the config's rms_norm_eps must be a number"),
        ({"rms_norm_eps": "x"}, "the config's rms_norm_eps must be a number"),
        ({"num_hidden_layers": 10**9}, "the config's num_hidden_layers is 1,000,000,000"),
        ({"intermediate_size": 0}, "the MLP needs one intermediate_size"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings must be a number of tokens, got '512'"),
        ({"model_type": 5}, "model_type must be a name, got 5"),
        ({"auto_map": "x"}, "auto_map must be an object, got 'x'"),
        ({"layer_types": [1, 2]}, "layer_types must be a list of names"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"quantization_config": "awq"}, "quantization_config must be an object, got 'awq'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta must be a positive"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "must have a positive number as factor, got 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "a"}}, "must have a positive number as factor, got 'a'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "not below high_freq_factor",
        ),
        ({"architectures": ["\x1b[31m"]}, r"\x1b[31m"),
    ],
    ids=str,
)
def test_a_config_with_values_of_another_kind(
    refused: Refused, model: Path, values: dict[str, Any], message: str
) -> None:
    change(model / "config.json", **values)
    assert message in refused(model, *(("--model-impl", "native") if "architectures" in values else ()))


def test_json_that_python_stumbles_over(refused: Refused, model: Path) -> None:
    good = (model / "config.json").read_text().rstrip().removesuffix("}")
    (model / "config.json").write_text(good + ', "x": ' + "[" * 900 + "]" * 900 + "}")
    assert "nested too deeply" in refused(model)
    (model / "config.json").write_text(good + ', "x": ' + "9" * 5000 + "}")
    assert "config.json: not JSON that can be read" in refused(model)
    (model / "config.json").write_text(good + "}")
    assert "not JSON that can be read" in refused(model, "--hf-overrides", '{"a":' * 50_000, code=2)
    assert "not JSON that can be read" in refused(model, "--hf-overrides", '{"a":' + "9" * 5000 + "}", code=2)
    nested = '{"x": ' + '{"a":' * 200 + "1" + "}" * 201
    assert "hf_overrides is nested too deeply" in refused(model, "--hf-overrides", nested)


# -- files


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX pipes")
def test_a_pipe_in_place_of_a_file(refused: Refused, model: Path) -> None:
    """To open one is to wait for whoever writes into it."""
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert "has no weights" in refused(model)


@pytest.mark.skipif(os.name == "nt", reason="POSIX links")
def test_a_link_to_itself_beside_a_good_model(model: Path, llm: LLM) -> None:
    (model / "notes.txt").symlink_to("notes.txt")
    with LLM(str(model), dtype="float32", kv_cache_memory_bytes=2_000_000) as other:
        assert text_of(other) == text_of(llm)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_runs_code(refused: Refused, model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save({**tensors, "evil": Evil(tmp_path / "sentinel")}, model / "pytorch_model.bin")
    line = refused(model)
    assert "is refused: its pickle holds more than tensors (GLOBAL" in line
    assert "Reading it could run code" in line
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "sentinel")))
    refused(model)
    assert not (tmp_path / "sentinel").exists()


def test_a_tokenizer_that_fails_on_every_text(refused: Refused, model: Path) -> None:
    """Ids beyond the model's; a length that is a word."""
    path = model / "tokenizer.json"
    good = json.loads(path.read_text())
    tokens = good["model"]["vocab"]
    path.write_text(json.dumps({**good, "model": {**good["model"], "vocab": {**tokens, "Q": 300}}}))
    assert "the tokenizer gives token id 300; the model's ids are 0 to 255" in refused(model, "--prompt", "Q")
    assert "the tokenizer gives token id 300" in refused(model, "--prompt", "Q", "--chat")
    path.write_text(json.dumps(good))
    change(model / "tokenizer_config.json", model_max_length="x")
    assert "model_max_length must be a number of tokens, got 'x'" in refused(model)


def test_a_panic_of_the_tokenizer_is_one_line(refused: Refused, model: Path) -> None:
    single = [{"SpecialToken": {"id": "zork", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    change(model / "tokenizer.json", post_processor=processor)
    assert "the tokenizer cannot encode the prompt: PanicException" in refused_quietly(refused, model)


def refused_quietly(refused: Refused, model: Path) -> str:
    """With the file descriptor of stderr closed to Rust, which prints its panics there by itself."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        return refused(model)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


# -- the process around it


def test_prompts_that_are_not_text(refused: Refused, good: Path) -> None:
    assert "half of one (U+DCFF). Were its bytes not UTF-8?" in refused(good, "--prompt", "\udcff", code=2)
    assert "--prompt - was given more than once" in refused(good, "--prompt", "-", "--prompt", "-", code=2)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    command = f'"{sys.executable}" -m modelbay list-archs {closed}'
    env = {**os.environ, "MODELBAY_CONFIG": ""}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=env, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) is (">&-" not in closed or closed == "2>&-")


def test_a_plugin_that_raises_past_exception(tmp_path: Path) -> None:
    """As the panics of extension modules do; only Ctrl-C goes through."""
    info = tmp_path / "hostile-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[modelbay]\nhostile = hostile\n")
    (tmp_path / "hostile.py").write_text("class Panic(BaseException): pass\nraise Panic('at the \\x1b[31mdisco')\n")
    env = {**os.environ, "MODELBAY_CONFIG": "", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "modelbay", "list-plugins"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert r"skipped: Panic: at the \x1b[31mdisco" in done.stderr


def test_a_command_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == "" or out.startswith("Usage: ")
    assert (out or err).count("\n") > 10
    assert "error:" not in err


def test_a_benchmark_of_more_sequences_than_fit_in_memory() -> None:
    from modelbay_runtime.bench import Shape

    with pytest.raises(UsageError, match="more than a machine measures"):
        Shape.parse("99999999999x1+1")
