"""The benchmarks: what is measured, in which order, what is made of it, and that nonsense is refused before loading.

Times are never asserted; numbers that must come out are computed from numbers that are given.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelbay.cli.main import run as run_cli
from modelbay.errors import EngineError, UsageError
from modelbay_runtime import bench
from modelbay_runtime.bench import Shape
from modelbay_testing.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def load(name: str) -> ModuleType:
    """A module of the benchmarks, which are scripts and not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


compare, loading, startup = load("compare"), load("loading"), load("startup")
checkpoints, engines, machine, processes, report, runs = (
    load(f"comparison.{name}") for name in ("checkpoints", "engines", "machine", "processes", "report", "run")
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# --- shapes, prompts, rates --------------------------------------------------------------------------------------


def test_shape_says_what_runs_and_what_counts() -> None:
    shape = Shape.parse(" 8x128+64 ")
    assert (shape.sequences, shape.prompt, shape.output) == (8, 128, 64)
    assert str(shape) == "8x128+64"
    assert shape.length == 192
    assert (shape.rate(2.0), shape.unit) == (8 * 64 / 2, "output tokens/s")
    long = Shape.parse("2x1024+1")
    assert (long.rate(4.0), long.unit) == (2 * 1024 / 4, "prompt tokens/s")


@pytest.mark.parametrize(
    "text", ["8x128", "8*128+64", "0x128+64", "8x0+64", "8x128+0", "-1x128+64", "8x128+64x", "ax1+1"]
)
def test_shape_that_makes_no_sense_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="SEQUENCESxPROMPT"):
        Shape.parse(text)


def test_list_of_shapes() -> None:
    assert [str(shape) for shape in bench.parse_shapes("1x2+3, 4x5+6,")] == ["1x2+3", "4x5+6"]
    for text in ("", " , ", "1x2+3,1x2+3"):
        with pytest.raises(UsageError):
            bench.parse_shapes(text)
    assert len(bench.parse_shapes(bench.DEFAULT_SHAPES)) == 4


def test_prompts_are_the_same_for_everybody_and_new_in_each_round() -> None:
    shape = Shape(4, 50, 1)
    prompts = bench.random_prompts(shape, 7, "0/1")
    assert prompts == bench.random_prompts(shape, 7, "0/1")
    assert [len(ids) for ids in prompts] == [50] * 4
    assert {token for ids in prompts for token in ids} == set(range(7))
    others = [*prompts, *bench.random_prompts(shape, 7, "0/2"), *bench.random_prompts(Shape(4, 51, 1), 7, "0/1")]
    heads = {tuple(ids[:16]) for ids in others}
    assert len(heads) == len(others), "a block that two prompts share would be served from the prefix cache"


def test_output_of_another_length_is_an_error_and_no_rate() -> None:
    with pytest.raises(EngineError, match="3 tokens were asked of each sequence, and 2 and 3 came"):
        bench.timed(lambda prompts, n: [[0] * n, [0] * (n - 1)], [[1], [2]], 3)
    with pytest.raises(EngineError, match="2 prompts were given, and 1 outputs came"):
        bench.timed(lambda prompts, n: [[0] * n], [[1], [2]], 3)
    seconds, outputs = bench.timed(lambda prompts, n: [[5] * n for _ in prompts], [[1], [2]], 3)
    assert outputs == [[5, 5, 5], [5, 5, 5]]
    assert seconds >= 0


def test_measure_counts_all_rounds_but_the_first_each_with_its_own_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 200.0, 202.0, 300.0, 304.0])  # the warm-up takes 100 s, the rounds 2 and 4
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    seen: list[Any] = []

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        seen.append(prompts)
        return [[0] * max_tokens for _ in prompts]

    spread = bench.measure(generate, Shape(2, 16, 8), 100, rounds=2, seed="0")
    assert spread.values == (8.0, 4.0)
    assert len(seen) == 3
    assert len({str(prompts) for prompts in seen}) == 3


def test_ratio_is_taken_round_by_round() -> None:
    """A machine that is twice as slow in one round leaves the ratio as it is."""
    spread = bench.ratios([10.0, 5.0, 12.0], [5.0, 2.5, 4.0])
    assert spread.to_dict() == {"median": 2.0, "min": 2.0, "max": 3.0, "values": [2.0, 2.0, 3.0]}
    with pytest.raises(ValueError, match="zip"):
        bench.ratios([1.0], [1.0, 2.0])


# --- the command -------------------------------------------------------------------------------------------------


def test_bench_command(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dtype", "float32", "--rounds", "2", "--shapes", "1x4+3,2x20+1"]
    assert run_cli(["bench", str(checkpoint), *flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dtype"] == "float32"
    assert [(row["shape"], row["unit"], len(row["values"])) for row in result["shapes"]] == [
        ("1x4+3", "output tokens/s", 2),
        ("2x20+1", "prompt tokens/s", 2),
    ]
    assert all(0 < row["min"] <= row["median"] <= row["max"] for row in result["shapes"])
    assert run_cli(["bench", str(checkpoint), *flags]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["SHAPE", "MEDIAN", "MIN", "MAX", "UNIT"]
    assert [row.split()[0] for row in rows] == ["1x4+3", "2x20+1"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--shapes", "1x4"], "SEQUENCESxPROMPT"),
        (["--rounds", "0"], "--rounds"),
        (["--shapes", "1x500+64"], "sequences of 564 tokens, and the model's maximum is 512"),
    ],
)
def test_bench_command_refuses(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert run_cli(["bench", str(checkpoint), *flags]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert says in error[0]


# --- workers, with engines that need no model --------------------------------------------------------------------

FAKES = '''
"""Engines that write down what they are asked."""
import json, os, sys, threading, time

class Fake:
    def __init__(self, name, journal, model="", first=0, short=0, fail="", spin=False, waits=0.0):
        print("a library that prints to standard output")
        os.write(1, b"even past Python")
        if fail == "load":
            raise RuntimeError("no such\\nmodel")
        self.name, self.journal, self.first, self.short, self.fail = name, journal, first, short, fail
        self.waits = waits
        if spin:
            threading.Thread(target=self.spin, daemon=True).start()

    def spin(self):
        while True:
            pass

    def generate(self, prompts, max_tokens):
        if self.fail == "exit":
            print("out of luck", file=sys.stderr)
            os._exit(3)
        if self.fail == "run":
            raise ValueError("bad prompt")
        begin = time.monotonic()
        time.sleep(self.waits)
        with open(self.journal, "a") as file:
            entry = {"name": self.name, "prompts": prompts, "begin": begin, "end": time.monotonic()}
            file.write(json.dumps(entry) + "\\n")
        return [[self.first] + [9] * (max_tokens - 1 - self.short) for _ in prompts]

    def generate_text(self, prompt, max_tokens):
        return self.generate([[len(prompt)]], max_tokens)[0]

    def facts(self):
        return {"versions": {"fake": "1"}, "threads": 1}
'''


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``fake("a", first=3)``: the spec of an engine; all of them write one journal."""
    (tmp_path / "fakes.py").write_text(FAKES, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name: str, **settings: Any) -> Any:
        given = {"name": name, "journal": str(tmp_path / "journal"), **settings}
        return processes.EngineSpec(name, "fakes:Fake", settings=given)

    return make


@pytest.fixture
def journal(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]


def plan(specs: list[Any], **changes: Any) -> Any:
    values = {"baseline": specs[-1].name, "shapes": [Shape(2, 20, 3)], "vocab_size": 50, "rounds": 3}
    return runs.Plan(specs, **{**values, **changes})


def test_engines_run_in_turn_one_at_a_time_on_the_same_prompts(fake: Any, journal: Any) -> None:
    specs = [fake("a", waits=0.02), fake("b", waits=0.02)]
    result = runs.compare(plan(specs, shapes=[Shape(2, 20, 3), Shape(1, 30, 1)]), lambda line: None)
    entries = journal()
    assert [entry["name"] for entry in entries] == ["a", "b"] * 8, "A B A B: a warm-up and three rounds of two shapes"
    assert all(before["end"] <= after["begin"] for before, after in itertools.pairwise(entries))
    prompts = [json.dumps(entry["prompts"]) for entry in entries]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 8, "no prompt comes twice, or the prefix cache would answer"
    assert [(row["shape"], row["unit"]) for row in result["shapes"]] == [
        ("2x20+3", "output tokens/s"),
        ("1x30+1", "prompt tokens/s"),
    ]
    assert all(len(row["engines"]["a"]["values"]) == 3 for row in result["shapes"]), "the warm-up does not count"


def test_result_holds_rates_ratios_and_agreement(fake: Any) -> None:
    result = runs.compare(plan([fake("a", first=1), fake("c", first=2), fake("b", first=1)]), lambda line: None)
    assert result["baseline"] == "b"
    assert set(result["engines"]) == {"a", "b", "c"}
    assert result["engines"]["a"]["versions"] == {"fake": "1"}
    row = result["shapes"][0]["engines"]
    assert row["b"]["ratio"]["values"] == [1.0, 1.0, 1.0]
    rates = zip(row["a"]["values"], row["b"]["values"], row["a"]["ratio"]["values"], strict=True)
    assert all(ratio == pytest.approx(own / base, rel=2e-3) for own, base, ratio in rates)
    assert {name: row[name]["first_tokens"]["equal"] for name in row} == {"a": 6, "b": 6, "c": 0}
    assert row["c"]["first_tokens"]["of"] == 6, "two sequences in each of three rounds"


def test_start_takes_a_fresh_process_each_time(fake: Any, journal: Any) -> None:
    result = runs.compare(plan([fake("a"), fake("b")], shapes=(), start=True, rounds=2), lambda line: None)
    assert [entry["name"] for entry in journal()] == ["a", "b"] * 3
    assert "shapes" not in result
    assert [len(engine["values"]) for engine in result["start"]["engines"].values()] == [2, 2]
    assert result["start"]["engines"]["b"]["ratio"]["median"] == 1.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fail": "load"}, "engine a: RuntimeError: no such model"),
        ({"fail": "run"}, "engine a: ValueError: bad prompt"),
        ({"fail": "exit"}, "engine a ended with code 3: .*out of luck"),
        ({"short": 1}, "3 tokens were asked of each sequence, and 2 came"),
        ({"colour": "red"}, "engine a: TypeError: .*colour"),
    ],
)
def test_engine_that_fails_ends_the_run_with_its_own_words(fake: Any, settings: dict[str, Any], says: str) -> None:
    started: list[Any] = []
    original = processes.Worker.__init__

    def remember(self: Any, spec: Any) -> None:
        original(self, spec)
        started.append(self._process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.Worker, "__init__", remember)
        with pytest.raises(EngineError, match=says):
            runs.compare(plan([fake("b"), fake("a", **settings)]), lambda line: None)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started), "no worker is left"


def test_interpreter_that_is_no_interpreter(fake: Any) -> None:
    spec = processes.EngineSpec("vllm", "comparison.engines:Vllm", python="/nowhere/python")
    with pytest.raises(EngineError, match="engine vllm: /nowhere/python: No such file"):
        processes.Worker(spec)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="pauses by signal")
def test_paused_worker_uses_no_cpu_even_if_its_threads_spin(fake: Any) -> None:
    with processes.Worker(fake("a", spin=True)) as worker:
        worker.answer()
        before = worker.cpu_seconds()
        while worker.cpu_seconds() - before < 0.05:  # it does spin
            time.sleep(0.01)
        worker.pause()
        before = worker.cpu_seconds()
        time.sleep(0.3)
        assert worker.cpu_seconds() - before <= 0.02
        worker.resume()
        worker.send(prompts=[[1]], max_tokens=2)
        assert worker.answer()["outputs"] == [[0, 9]]


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "no model was given. Use --model DIR."),
        (
            ["--model", "M", "--engines", "modelbay,llama.cpp"],
            "unknown engine 'llama.cpp'; known: modelbay,",
        ),
        (["--model", "M", "--engines", "hf,hf"], "--engines wants different engines"),
        (["--model", "M", "--engines", ","], "--engines wants different engines"),
        (["--model", "M", "--baseline", "vllm"], "--baseline 'vllm' is not among the engines modelbay, hf"),
        (["--model", "M", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--model", "M", "--engines", "modelbay,vllm-eager"], "--vllm-python PATH"),
        (["--model", "M", "--shapes", "1x2"], "SEQUENCESxPROMPT"),
        (["--model", "M", "--shapes", "none"], "leaves nothing to measure. Add --start."),
        (["--model", "M", "--modelbay-args", "{"], "--modelbay-args is not JSON"),
        (["--model", "M", "--modelbay-args", "[1]"], "--modelbay-args wants a JSON object"),
        (["--model", "M", "--shapes", "1x600+1"], "sequences of 601 tokens, and the model's maximum is 512"),
    ],
)
def test_nonsense_is_refused_before_an_engine_is_loaded(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], says: str
) -> None:
    monkeypatch.setattr(compare, "compare", lambda *args: pytest.fail("an engine was started"))
    assert compare.main([str(checkpoint) if flag == "M" else flag for flag in flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_engines_are_given_what_makes_them_comparable(checkpoint: Path) -> None:
    argv = ["--model", str(checkpoint), "--engines", "modelbay,hf,vllm,vllm-eager", "--vllm-python", "/v/bin/python"]
    options = compare.parser().parse_args([*argv, "--shapes", "1x8+8", "--modelbay-args", '{"kernels": "torch"}'])
    made, _ = compare.make_plan(options)
    assert made.baseline == "hf"
    assert made.vocab_size == 256
    settings = {spec.name: dict(spec.settings) for spec in made.engines}
    assert settings["modelbay"].pop("kernels") == "torch"
    assert len({json.dumps(given) for given in settings.values()}) == 1
    assert settings["hf"] == {"model": str(checkpoint), "dtype": "bfloat16", "max_model_len": 512}
    by_name = {spec.name: spec for spec in made.engines}
    assert by_name["vllm"].python == by_name["vllm-eager"].python == "/v/bin/python"
    assert by_name["hf"].python == sys.executable
    assert by_name["vllm"].environment()["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


# --- one real run ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_compare_really_runs(checkpoint: Path, tmp_path: Path) -> None:
    """Ours beside Transformers on a tiny model in float32: both give the same first tokens."""
    before = sorted(path.name for path in report.RESULTS.glob("*"))
    page = report.PAGE.read_text(encoding="utf-8")
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--model", str(checkpoint), "--dtype", "float32"]
    flags = ["--shapes", "1x6+4,3x8+1", "--rounds", "2", "--json", str(tmp_path / "result.json")]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert set(result) >= {"kind", "model", "dtype", "date", "commit", "machine", "engines", "shapes", "rounds", "seed"}
    assert set(result["machine"]) >= {"cpu", "cores", "memory_gib", "load_before"}
    assert result["model"]["architecture"] == "LlamaForCausalLM"
    assert [row["shape"] for row in result["shapes"]] == ["1x6+4", "3x8+1"]
    assert list(result["engines"]) == ["modelbay", "hf"]
    for about in result["engines"].values():
        assert {"torch", "transformers"} <= set(about["versions"])
        assert about["threads"] == 1
    for row in result["shapes"]:
        sequences = Shape.parse(row["shape"]).sequences
        assert row["engines"]["modelbay"]["cores"]["median"] > 0
        assert row["engines"]["modelbay"]["first_tokens"] == {"equal": 2 * sequences, "of": 2 * sequences}
    assert str(checkpoint.parent) not in json.dumps(result), "a result does not say where somebody keeps files"
    assert done.stdout.startswith("## tiny\n")
    assert sorted(path.name for path in report.RESULTS.glob("*")) == before
    assert report.PAGE.read_text(encoding="utf-8") == page


def test_gguf_file_is_what_transformers_wants_of_it() -> None:
    assert engines.transformers_source("/models/x.gguf") == ("/models", {"gguf_file": "x.gguf"})
    assert engines.transformers_source("/models/x") == ("/models/x", {})


# --- the page ----------------------------------------------------------------------------------------------------


def a_result(**changes: Any) -> dict[str, Any]:
    values = {
        "kind": "comparison",
        "model": {"architecture": "LlamaForCausalLM", "bytes": 269_000_000},
        "dtype": "bfloat16",
        "date": "2026-01-02",
        "commit": "0123456789abcdef" + "+changes",
        "machine": {"cpu": "A CPU", "cores": 2, "memory_gib": 23.6, "instructions": ["avx2", "avx512_bf16"]},
        "rounds": 2,
        "baseline": "hf",
        "engines": {name: {"versions": {"torch": "2.0"}, "threads": 2} for name in ("modelbay", "hf")},
        "shapes": [
            {
                "shape": "8x128+64",
                "unit": "output tokens/s",
                "engines": runs.summarize({"modelbay": [1500.0, 1000.0], "hf": [1000.0, 500.0]}, "hf"),
            }
        ],
    }
    for engine in values["shapes"][0]["engines"].values():
        engine["cores"] = {"median": 1.9}
        engine["first_tokens"] = {"equal": 15, "of": 16}
    return {**values, **changes}


def test_rendered_result_has_ratios_with_spread_and_where_it_was_measured() -> None:
    text = report.render("some-model", a_result())
    assert text.startswith("## some-model\n\nLlamaForCausalLM, bfloat16, 269.0 MB of parameters. Rounds: 2.")
    assert "| shape | `modelbay` | `hf` |\n| --- | ---: | ---: |" in text
    assert "| `8x128+64` | **1.75** (1.50 to 2.00) | 1.00 |" in text
    assert "| 8x128+64 | 1,250 | 750 | output tokens/s |" in text
    assert "Cores in use (median of the shapes): `modelbay` 1.90, `hf` 1.90." in text
    assert "equal those of `hf`: `modelbay` 15 of 16." in text
    assert "Measured 2026-01-02 at `0123456789ab+changes` on A CPU, 2 cores, 24 GiB (avx2, avx512_bf16)." in text
    assert "`hf` with 2 threads, torch 2.0." in text


def test_rendered_start_times() -> None:
    start = {"unit": "s", "engines": runs.summarize({"modelbay": [3.0, 2.0], "hf": [2.0, 2.0]}, "hf")}
    result = a_result(start=start)
    del result["shapes"]
    text = report.render("some-model", result)
    assert "| ratio | **1.25** (1.00 to 1.50) | 1.00 |" in text
    assert "| seconds | 2.5 | 2 |" in text
    assert "Tokens per second" not in text


def test_page_is_what_the_results_say() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    expected = report.page_with(page, report.render_all())
    assert page == expected, "run `python benchmarks/compare.py --render`"


def test_page_keeps_what_people_wrote(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nThe end.\n", encoding="utf-8")
    report.update_page(page, results)
    assert "No result has been recorded yet." in page.read_text(encoding="utf-8")
    report.write_result(a_result(), results / "b.json")
    report.write_result(a_result(), results / "a.json")
    report.update_page(page, results)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\n{report.BEGIN}\n\n## a\n")
    assert text.endswith(f"\n\n{report.END}\n\nThe end.\n")
    assert text.index("## a\n") < text.index("## b\n")
    assert "old" not in text
    with pytest.raises(ValueError, match="the page has no part"):
        report.page_with("# Title\n", "x")


def test_machine_facts() -> None:
    facts = machine.facts()
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["memory_gib"] > 0
    assert facts["machine"]["cpu"]
    json.dumps(facts)


# --- checkpoints and loading -------------------------------------------------------------------------------------


def test_qwen2_shape_is_that_of_the_half_billion_model() -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(checkpoints.qwen2_config())
    assert model.num_parameters() == 494_032_768
    assert model.config.rope_parameters["rope_theta"] == 1e6


def test_made_checkpoint_is_one_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}
    folder = checkpoints.make_qwen2(tmp_path / "qwen2", **sizes, bos_token_id=1, eos_token_id=2)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert run_cli(["bench", str(folder), "--shapes", "2x5+2", "--rounds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    assert compare.main(["--make-qwen2-0.5b", str(folder)]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_loads_are_interleaved_and_the_first_does_not_count() -> None:
    asked: list[str] = []

    def fake_load(name: str) -> dict[str, Any]:
        asked.append(name)
        return {"seconds": len(asked), "peak_bytes": 0}

    measured = loading.measure(fake_load, 2)
    assert asked == ["modelbay", "modelbay-repacked", "safetensors", "hf"] * 3
    assert [run["seconds"] for run in measured["safetensors"]] == [7, 11]


@pytest.mark.parametrize(("peak", "within"), [(135.0, True), (136.0, False)])
def test_w7_limit_is_the_parameters_and_the_largest_tensor(peak: float, within: bool) -> None:
    ours = [{"seconds": 2.0, "peak_bytes": value, "bytes": 100, "largest_tensor": 20} for value in (110.0, peak)]
    plain = [{"seconds": 1.0, "peak_bytes": 200.0}] * 2
    result = loading.summarize({"modelbay": ours, "modelbay-repacked": ours, "safetensors": plain, "hf": plain})
    assert result["within_time_limit"] is False
    assert result["limit"] == 1.35
    assert result["within_limit"] is within
    assert result["loaders"]["modelbay"]["ratio"]["median"] == 2.0
    assert result["loaders"]["modelbay"]["peak"]["max"] == peak / 100
    text = report.render("x-loading", {**a_result(kind="loading"), **result})
    assert f"| `modelbay` | 2.00 | 2.00 | **{(110 + peak) / 200:.2f}** (1.10 to {peak / 100:.2f}) |" in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's peak of the process")
@pytest.mark.usefixtures("one_thread")
def test_one_real_load(checkpoint: Path) -> None:
    ours = loading.load("modelbay", str(checkpoint), "bfloat16")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    embedding = config["vocab_size"] * config["hidden_size"]
    assert ours["largest_tensor"] == embedding * 4
    assert ours["bytes"] > 2 * embedding * 2
    assert ours["seconds"] > 0
    with pytest.raises(EngineError, match="loader safetensors ended with code 1"):
        loading.load("safetensors", str(checkpoint), "bfloat17")


# --- start-up ----------------------------------------------------------------------------------------------------


def test_startup_is_interleaved_and_its_first_round_does_not_count() -> None:
    asked: list[str] = []

    def fake(command: list[str]) -> Any:
        asked.append(command[-1])
        return startup.Cost(cpu=float(len(asked)), wall=2.0)

    groups = [
        startup.Group("base", "import a", {"one": ["x"]}, limit=1.3),
        startup.Group("other", "import b", {"two": ["y"]}),
    ]
    result = startup.measure(groups, ["large"], 2, 3, fake)
    assert asked == ["import a", "x", "import b", "y"] * 3 + ["large"] * 3
    first = result["groups"][0]
    assert first["commands"]["base"]["cpu"]["values"] == [5.0, 9.0]
    assert first["commands"]["one"]["cpu"]["values"] == [6.0, 10.0]
    assert first["commands"]["one"]["ratio"]["median"] == pytest.approx((6 / 5 + 10 / 9) / 2, rel=1e-3)
    assert first["within_limit"] is True
    assert "limit" not in result["groups"][1]
    assert result["large"]["values"] == [2.0] * 3
    text = report.render("startup", result)
    assert "| `one` | **1.16** (1.11 to 1.20) | 1.00 | 8.00 | 1.3 |" in text
    assert "on the meta device: 2.0 s (2.0 to 2.0); the limit is 30 s." in text


def test_what_startup_explains_is_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands it times do what their names say, and a process that fails ends the run."""
    for group in startup.groups(tmp_path):
        for argv in group.commands.values():
            if argv[0] == "explain":
                assert run_cli([*argv, "--json"]) == 0
                trace = json.loads(capsys.readouterr().out)["trace"]
                [found] = [one for one in trace if one["question"] == "config class"]
                assert found["source"].startswith("modelbay-llama" if "llama" in argv[-1] else "transformers ")
    assert startup.run([sys.executable, "-c", "sum(range(10))"]).cpu > 0
    with pytest.raises(EngineError, match=r"ended with code 3: out of luck"):
        startup.run([sys.executable, "-c", "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"])


def test_loading_needs_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loading.main(["--model", str(tmp_path)]) == 2
    assert "has no safetensors files" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def recorded_results_stay_as_they_are() -> Iterator[None]:
    before = {path: path.read_bytes() for path in [report.PAGE, *report.RESULTS.glob("*.json")]}
    yield
    assert {path: path.read_bytes() for path in [report.PAGE, *report.RESULTS.glob("*.json")]} == before
