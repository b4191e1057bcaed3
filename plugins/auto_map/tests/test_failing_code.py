"""Custom code that raises: one line, and with --debug its own line of code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modelbay import LLM, SamplingParams
from modelbay.cli.main import run
from modelbay.errors import BackendError, EngineError, RemoteCodeError

RAISE = "raise ValueError('the bees are\\nout')  # own line"

#: Where it raises: (what is changed, what the one line says).
FAILURES = {
    "import": (
        {"class HiveExperts(nn.ModuleList)": f"{RAISE}\n\n\nclass HiveExperts(nn.ModuleList)"},
        "modeling_hive.py of {folder} failed while it was imported: ValueError: the bees are out",
    ),
    "constructor": (
        {"        self.top_k = config.num_experts_per_tok\n": f"        {RAISE}\n"},
        "HiveModel of {folder} raised ValueError while it was built: the bees are out",
    ),
    "forward": (
        {"        hidden_states = hidden_states + self.": f"        {RAISE}\n        hidden_states = self."},
        "HiveModel cannot be run on token ids and positions alone: ValueError: the bees are out",
    ),
    "forward, with values": (
        {"        angles = ": f"        if position_ids.max() > 11:\n            {RAISE}\n        angles = "},
        "HiveModel raised ValueError in its forward: the bees are out",
    ),
}  # fmt: skip


@pytest.fixture
def failing(make_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    def make(where: str) -> Path:
        folder = make_checkpoint("hive")
        path = folder / "modeling_hive.py"
        [(old, new)] = FAILURES[where][0].items()
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        return folder

    return make


@pytest.mark.parametrize("where", FAILURES)
def test_one_line_and_with_debug_its_own_traceback(
    where: str, failing: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = failing(where)
    argv = [
        "generate",
        str(folder),
        "--prompt",
        "The quick brown fox jumps over 0 1 2 3 4 5 6 7 8 9",
        "--max-tokens",
        "2",
    ]
    argv += ["--trust-remote-code", "--dtype", "float32", "--device", "cpu"]
    assert run(argv) == 1
    lines = capfd.readouterr().err.strip().splitlines()
    [error] = [line for line in lines if line.startswith("error: ")]
    assert error == lines[-1]
    assert FAILURES[where][1].format(folder=folder) in error
    assert "Traceback" not in "".join(lines)

    assert run(["--debug", *argv]) == 1
    shown = capfd.readouterr().err
    line = next(
        n for n, text in enumerate((folder / "modeling_hive.py").read_text().splitlines(), 1) if "# own line" in text
    )
    assert f'modeling_hive.py", line {line}, in ' in shown
    assert "raise ValueError('the bees are\\nout')  # own line" in shown


@pytest.mark.parametrize(
    ("where", "kind"),
    [("import", RemoteCodeError), ("constructor", BackendError), ("forward", BackendError)],
)
def test_the_original_error_is_the_cause(where: str, kind: type[Exception], failing: Callable[[str], Path]) -> None:
    with pytest.raises(kind) as caught:
        LLM(str(failing(where)), trust_remote_code=True, device="cpu")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_forward_that_raises_does_not_end_the_engine(failing: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(failing("forward, with values")), trust_remote_code=True, device="cpu", dtype="float32") as llm:
        with pytest.raises(EngineError) as caught:
            llm.generate({"prompt_token_ids": [5] * 20}, params, use_tqdm=False)
        assert isinstance(caught.value.__cause__, ValueError)
        (output,) = llm.generate({"prompt_token_ids": [5] * 6}, params, use_tqdm=False)
        assert output.finished


def test_an_absent_dependency_says_what_to_install(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("hive")
    path = folder / "modeling_hive.py"
    path.write_text(f"{path.read_text()}\nimport beekeeping_tools\n")
    with pytest.raises(RemoteCodeError, match="it needs the Python package beekeeping_tools"):
        LLM(str(folder), trust_remote_code=True, device="cpu")
