"""The how-to page, followed from top to bottom: its files written, its commands run, what it shows compared."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from modelbay import LLM, SamplingParams, resolve
from modelbay.cli.main import run
from modelbay_runtime.build import build_model
from modelbay_testing.recording import record_logits

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "custom-models.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
KINDS = {"python", "json", "toml", "console"}


def follow(folder: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Do what each block says, in order; returns what the untitled Python blocks printed."""
    printed: list[str] = []
    for language, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        assert language in KINDS
        if title:
            (folder / title).parent.mkdir(exist_ok=True)
            (folder / title).write_text(text, encoding="utf-8")
        elif language == "console":
            run_console(text, capfd)
        else:
            assert language == "python"
            exec(compile(text, str(PAGE), "exec"), {"__name__": "page"})
            printed += capfd.readouterr().out.splitlines()
    return printed


def run_console(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each ``$`` line; each line below it must be in its output, where ``…`` stands for anything."""
    for command, _, shown in (part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.M) if part.strip()):
        program, *words = shlex.split(command)
        if program == "python":
            runpy.run_path(words[0])
            code = 0
        else:
            assert program == "modelbay"
            code = run(words)
        captured = capfd.readouterr()
        output = " ".join(f"{captured.out} {captured.err}".split())
        assert code == int("error: " in shown), f"$ {command}\n{output}"
        for piece in filter(
            None, (" ".join(piece.split()) for line in shown.splitlines() for piece in line.split("…"))
        ):
            assert piece in output, f"$ {command}\nshows {piece!r}, but printed:\n{output}"


def test_the_page_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, *tokens = follow(tmp_path, capfd)
    assert kind == "<class 'modelbay_transformers.model.TransformersForCausalLM'>"
    assert len(tokens) == 2
    check_numbers(tmp_path / "my-model")
    check_config_file(tmp_path, monkeypatch)
    check_plans(tmp_path, monkeypatch)


def check_numbers(model: Path) -> None:
    """The page's model computes here what it computes in Transformers."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=True)
    own = AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="eager").eval()
    own.load_state_dict(load_file(model / "model.safetensors"))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(str(model), trust_remote_code=True, dtype="float32", device="cpu") as llm:
        with record_logits(llm) as recording:
            outputs = llm.generate(["The quick brown fox", "A", "Numbers 0 1 2 3"], params, use_tqdm=False)
        for output in outputs:
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            with torch.inference_mode():
                expected = own(input_ids=torch.tensor([tokens])).logits[0]
            assert recording.worst_difference(output.request_id, expected) <= 1e-4


def check_config_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELBAY_CONFIG", str(folder / "config.toml"))
    resolution = resolve("./my-model", trust_remote_code=True)
    assert "[model_impl] in" in str(resolution.trace.find("backend", "backends"))
    assert resolution.backend == "auto_map"
    monkeypatch.delenv("MODELBAY_CONFIG")


def check_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's plans, put where it says, match something each."""
    path = folder / "my-model" / "configuration_my_model.py"
    plans = "".join(f"    {line}\n" for line in (folder / "plans.py").read_text().splitlines())
    path.write_text(path.read_text().replace('    model_type = "my_model"\n', f'    model_type = "my_model"\n{plans}'))
    monkeypatch.setenv("MODELBAY_TRUST_LOCK", "")
    resolution = resolve("./my-model", trust_remote_code=True)
    build_model(resolution)
    shown = {decision.question: decision.answer for decision in resolution.trace if decision.stage == "plan"}
    assert shown["base_model_tp_plan"] == "4 patterns"
    assert shown["base_model_pp_plan"] == "embed_tokens, layers, norm"


def test_what_the_rules_say_is_what_the_errors_say() -> None:
    """Each message of the page's table is one that the code can give."""
    root = PAGE.parents[2]
    folders = [root / "plugins/auto_map/src", root / "backends/transformers/src", root / "core/modelbay"]
    source = " ".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)
    table = PAGE.read_text(encoding="utf-8").partition("## The rules")[2].partition("\n## ")[0]
    messages = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ") and "---" not in row]
    pieces = [
        piece.strip()
        for cell in messages
        for quoted in re.findall(r"`([^`]+…[^`]*)`", cell)
        for piece in quoted.split("…")
    ]
    assert len(pieces) > 15
    for piece in filter(None, pieces):
        assert piece in source, piece
