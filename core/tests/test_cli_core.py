"""The core's commands: output, exit codes, one line for every error; every engine argument as a flag."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from modelbay import __version__
from modelbay.args import EngineArgs
from modelbay.cli.group import split_global_options
from modelbay.cli.main import _print_everything, run
from modelbay.cli.options import engine_kwargs_from, engine_options, flag
from modelbay.cli.output import print_json, print_lines, print_table
from modelbay.resolve import engine_args
from modelbay.settings import load_settings
from modelbay.trace import Trace
from modelbay_testing.distributions import see_only, write_distribution

PLUGIN = """
from modelbay import hookimpl
from modelbay.specs import *

@hookimpl
def register_architectures():
    return [
        ArchSpec(name="FooForCausalLM", target="nowhere:Foo", model_types=("foo",), parallel=("tp", "pp")),
        ArchSpec(name="FooModel", target="nowhere:Foo", model_types=("foo", "foo2"), tasks=("embed",)),
    ]

@hookimpl
def register_modeling_backends():
    return [BackendSpec(name="native", target="acme_foo_code:Backend")]

@hookimpl
def register_commands():
    return [
        CommandSpec(name=name, target=f"acme_foo_code:{name}", summary=f"Test {name}.")
        for name in ("boom", "hang", "full", "quiet", "fatal", "number")
    ]
"""

CODE = """
import click
from modelbay.backends import Verdict
from modelbay.errors import EngineError

def fails(name, error):
    @click.command(name)
    def command():
        raise error
    return command

boom = fails("boom", ValueError("first\\nsecond"))
hang = fails("hang", KeyboardInterrupt())
full = fails("full", OSError(28, "No space left on device", "model.safetensors"))
quiet = fails("quiet", BrokenPipeError())
fatal = fails("fatal", EngineError("a worker died.", hint="Look above."))
number = 3

class Backend:
    def assess(self, files, config, arch, args, plugins):
        return Verdict(True, f"{arch.name} is registered")

    def dry_run(self, resolution):
        resolution.trace.decide("build", "parameters", 12, "meta")
        if resolution.args.seed == 13:
            raise ValueError("unlucky")
        resolution.trace.warn("kernels", "rms_norm", "torch", "reference")
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """``code, stdout, stderr = cli("list-archs", "--json")``, with acme-foo as the only plugin beside the core."""
    site = write_distribution(tmp_path, "acme-foo", {"acme_foo_plugin.py": PLUGIN, "acme_foo_code.py": CODE})
    monkeypatch.syspath_prepend(str(site))
    see_only(monkeypatch, site)
    for variable in ("MODELBAY_PLUGINS", "MODELBAY_PREFER", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def call(*argv: str) -> tuple[int, str, str]:
        code = run(list(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    for module in ("acme_foo_plugin", "acme_foo_code"):
        sys.modules.pop(module, None)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reference leads to a model of type foo."""
    config = SimpleNamespace(
        sources={},
        architectures=("FooForCausalLM",),
        model_type="foo",
        raw={},
        text=SimpleNamespace(),
        quantization=None,
    )

    def find_files(reference: str, *, trace: Any, **kwargs: Any) -> Any:
        trace.decide("source", "files", reference, "local path")
        return SimpleNamespace(commit="0" * 40, path=lambda name: None)

    monkeypatch.setattr("modelbay.source.find_files", find_files)
    monkeypatch.setattr("modelbay.config.load_config", lambda *arguments: config)
    monkeypatch.setattr("modelbay.tokenizer.load_tokenizer", lambda *arguments: None)
    monkeypatch.setattr("modelbay.weights.choose.choose_format", lambda *arguments: None)


# -- lists


def test_a2_list_archs_json_is_a_list_of_objects(cli: Run) -> None:
    code, out, err = cli("list-archs", "--json")
    assert (code, err) == (0, "")
    first, second = json.loads(out)
    assert first == {
        "name": "FooForCausalLM",
        "tasks": ["generate"],
        "modalities": ["text"],
        "owner": "acme-foo",
        "version": "1.0",
        "model_types": ["foo"],
        "parallel": ["tp", "pp"],
        "attention": ["full"],
        "examples": [],
    }
    assert second["name"] == "FooModel"


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["--task", "embed"], ["FooModel"]),
        (["--task", "classify"], []),
        (["--model-type", "foo"], ["FooForCausalLM", "FooModel"]),
        (["--model-type", "foo2"], ["FooModel"]),
        (["--owner", "Acme_Foo"], ["FooForCausalLM", "FooModel"]),
        (["--owner", "acme"], []),
        (["--task", "embed", "--model-type", "bar"], []),
    ],
)
def test_a2_list_archs_filters(cli: Run, filters: list[str], names: list[str]) -> None:
    assert [arch["name"] for arch in json.loads(cli("list-archs", "--json", *filters)[1])] == names


def test_list_archs_piped_is_one_whole_line_for_each(cli: Run) -> None:
    code, out, _ = cli("list-archs")
    assert code == 0
    header, *rows = out.splitlines()
    assert header.split()[:2] == ["NAME", "TASKS"]
    assert rows[0] == "FooForCausalLM  generate  acme-foo 1.0  foo          tp, pp    full"
    assert len(rows) == 2
    assert "No installed plugin" in cli("list-archs", "--owner", "x")[2]


def test_piped_tables_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("x" * 500, "y")])
    assert "x" * 500 + "  y" in capsys.readouterr().out


def test_on_a_terminal_output_is_styled_and_names_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    for name, value in {"COLUMNS": "60", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    print_table(("name", "b"), [("A" * 30, "word " * 20)])
    print_lines([[("[not markup] ", "bold"), ("plain", "")]])
    text = terminal.getvalue()
    assert "A" * 30 in text
    assert text.count("word") == 20
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= 60
    assert "\x1b[1m[not markup] \x1b[0mplain" in text


def test_a2_list_plugins_shows_hooks_versions_and_failures(cli: Run, tmp_path: Path) -> None:
    write_distribution(tmp_path, "acme-broken", {"acme_broken.py": "raise ValueError('no good')"}, version="3.1")
    code, out, err = cli("list-plugins", "--json")
    assert code == 0
    records = {record["name"]: record for record in json.loads(out)}
    assert set(records) == {"core", "broken", "foo"}
    assert records["foo"]["hooks"] == ["register_architectures", "register_commands", "register_modeling_backends"]
    assert (records["broken"]["status"], records["broken"]["error"]) == ("failed", "ValueError: no good")
    assert err == "warning: plugin acme-broken 3.1 (entry point 'broken') skipped: ValueError: no good\n"
    assert "ValueError: no good" in cli("list-plugins")[1]


def test_version_lists_libraries_and_plugins(cli: Run) -> None:
    code, out, _ = cli("version", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["modelbay"] == __version__
    assert data["plugins"]["foo"] == "acme-foo 1.0"
    assert data["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "plugin foo" in cli("version")[1]


def test_config_shows_the_source_of_each_setting_and_no_secret(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[args]\nseed = 3\n[prefer]\nX = "a"\n[model_impl]\nFoo = "native"\n')
    monkeypatch.setenv("MODELBAY_CONFIG", str(path))
    monkeypatch.setenv("MODELBAY_PREFER", "Y=b")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code, out, _ = cli("config", "--json")
    assert code == 0
    entries = {entry["setting"]: (entry["value"], entry["source"]) for entry in json.loads(out)}
    assert entries["args.seed"] == (3, str(path))
    assert entries["args.dtype"] == ("auto", "default")
    assert entries["prefer.X"] == ("a", str(path))
    assert entries["prefer.Y"] == ("b", "MODELBAY_PREFER")
    assert entries["model_impl.Foo"] == ("native", str(path))
    assert entries["HF_TOKEN"] == ("(set)", "environment")
    assert "hf_secret" not in out + cli("config")[1]


# -- explain


def test_explain_json_is_the_trace_as_data(cli: Run, model: None) -> None:
    code, out, err = cli("explain", "org/foo", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["resolution"]["architecture"] == "FooForCausalLM"
    assert data["resolution"]["owner"] == "acme-foo 1.0"
    assert data["resolution"]["backend"] == "native"
    assert data["error"] is None
    stages = [decision["stage"] for decision in data["trace"]]
    assert {"plugins", "source", "architectures", "backends", "build", "kernels"} == set(stages)
    assert data["trace"][-1] == {
        "stage": "kernels",
        "question": "rms_norm",
        "answer": "torch",
        "source": "reference",
        "rejected": [],
        "level": "warning",
    }


def test_explain_prints_every_decision_under_its_stage(cli: Run, model: None) -> None:
    code, out, _ = cli("explain", "org/foo")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "org/foo"
    assert "  files: org/foo  [local path]" in lines[lines.index("source") :]
    assert "  parameters: 12  [meta]" in lines[lines.index("build") :]
    assert "! rms_norm: torch  [reference]" in lines[lines.index("kernels") :]


def test_explain_no_build_says_what_stays_undecided(cli: Run, model: None) -> None:
    data = json.loads(cli("explain", "org/foo", "--json", "--no-build")[1])
    assert data["undecided"] == ["config", "build", "plan", "kernels"]  # the test's config decides nothing
    assert "undecided: config, build, plan, kernels" in cli("explain", "org/foo", "--no-build")[1]


def test_explain_shows_the_trace_so_far_and_then_the_error(cli: Run, model: None) -> None:
    code, out, err = cli("explain", "org/foo", "--model-impl", "other")
    assert code == 2
    assert "architecture: FooForCausalLM" in out
    assert err.startswith("error: unknown model_impl 'other'; installed: auto, native.")
    code, out, err = cli("explain", "org/foo", "--seed", "13", "--json")
    assert code == 1
    data = json.loads(out)
    assert data["error"] == {"type": "ValueError", "message": "unlucky"}
    assert data["trace"][-1]["question"] == "parameters"


def test_explain_of_the_real_hallway_names_a_missing_path(cli: Run, tmp_path: Path) -> None:
    code, _, err = cli("explain", str(tmp_path / "absent"))
    assert code == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "absent" in err


def test_plugin_options_reach_the_resolution(cli: Run, model: None) -> None:
    code, _, err = cli("explain", "org/foo", "--plugins", "")
    assert code == 1
    assert "no modelling backend is installed" in err
    assert "foo (acme-foo)" in err


# -- errors and exit codes


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["fatal"], 1, "error: a worker died. Look above.\n"),
        (["boom"], 1, "error: internal: ValueError: first second (run with --debug)\n"),
        (["full"], 1, "error: No space left on device: model.safetensors\n"),
        (["hang"], 130, "interrupted\n"),
        (["quiet"], 141, ""),
        (["number"], 1, "error: 'acme_foo_code:number' of acme-foo 1.0 is not a click command.\n"),
        (["list-arch"], 2, "error: no such command 'list-arch'. Nearest: list-archs.\n"),
        (["explain"], 2, "error: Missing argument 'MODEL'. Try 'modelbay explain --help'.\n"),
        (
            ["list-archs", "extra"],
            2,
            "error: Got unexpected extra argument (extra) Try 'modelbay list-archs --help'.\n",
        ),
        (["list-archs", "--prefer", "x"], 2, "error: --prefer has 'x'; it takes NAME=DIST.\n"),
    ],
)
def test_every_error_is_one_line_with_its_exit_code(cli: Run, argv: list[str], code: int, message: str) -> None:
    assert cli(*argv) == (code, "", message)


def test_debug_adds_the_traceback(cli: Run) -> None:
    for argv in (["--debug", "boom"], ["boom", "--debug"]):
        code, _, err = cli(*argv)
        assert code == 1
        assert "Traceback (most recent call last)" in err
        assert err.endswith("error: internal: ValueError: first second (run with --debug)\n")


def test_a_usage_error_of_an_engine_argument_is_exit_code_2(cli: Run, model: None) -> None:
    code, _, err = cli("explain", "m", "--max-model-len", "0")
    assert (code, err) == (2, "error: max_model_len must be a positive integer, got 0.\n")
    code, _, err = cli("explain", "m", "--hf-overrides", "{")
    assert code == 2
    assert "not JSON" in err


# -- global options and help


def test_global_options_may_follow_the_command(cli: Run) -> None:
    assert json.loads(cli("--plugins", "", "list-archs", "--json")[1]) == []
    assert json.loads(cli("list-archs", "--json", "--plugins", "")[1]) == []
    assert json.loads(cli("list-archs", "--plugins=", "--json")[1]) == []
    assert len(json.loads(cli("list-archs", "--json", "--plugins", "foo")[1])) == 2


def test_split_global_options_leaves_what_follows_two_dashes() -> None:
    argv = ["x", "--debug", "--prefer", "A=b", "--task", "t", "--plugins=a", "--", "--debug"]
    ours, rest = split_global_options(argv)
    assert ours == ["--debug", "--prefer", "A=b", "--plugins=a"]
    assert rest == ["x", "--task", "t", "--", "--debug"]


def test_strict_plugins_fails_on_a_broken_plugin(cli: Run, tmp_path: Path) -> None:
    write_distribution(tmp_path, "acme-broken", {"acme_broken.py": "raise ValueError('no good')"})
    code, out, err = cli("list-archs", "--strict-plugins")
    assert (code, out) == (1, "")
    assert err == "error: plugin 'broken' of acme-broken 1.0 failed: ValueError: no good.\n"


def test_help_lists_every_command_without_importing_its_code(cli: Run) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    for name in ("list-archs", "list-plugins", "explain", "version", "config", "boom"):
        assert f"  {name} " in out
    assert "Test boom." in out
    assert "acme_foo_code" not in sys.modules
    assert "boom" not in cli("--help", "--plugins", "")[1]


def test_version_option_loads_no_plugin(cli: Run) -> None:
    assert cli("--version") == (0, f"modelbay {__version__}\n", "")
    assert "acme_foo_plugin" not in sys.modules


def test_a_command_of_two_owners_is_chosen_by_preference(cli: Run, tmp_path: Path) -> None:
    rival = PLUGIN.replace("acme_foo_code", "acme_rival_code")
    code_of = CODE.replace("a worker died.", "the rival's worker died.")
    write_distribution(tmp_path, "acme-rival", {"acme_rival.py": rival, "acme_rival_code.py": code_of})
    code, _, err = cli("fatal")
    assert code == 1
    assert "--prefer fatal=acme-foo or --prefer fatal=acme-rival" in err
    assert "the rival's worker died" in cli("fatal", "--prefer", "fatal=acme-rival")[2]
    assert "Offered by several plugins" in cli("--help")[1]


# -- engine arguments as flags


def invoke(*argv: str) -> tuple[dict[str, Any], EngineArgs]:
    seen: list[Any] = []

    @click.command()
    @click.argument("model")
    @click.option("--prompt")
    @engine_options
    @click.pass_context
    def command(ctx: click.Context, model: str, **options: Any) -> None:
        kwargs = engine_kwargs_from(ctx, options)
        seen.extend([kwargs, engine_args(model, kwargs, load_settings(), Trace())])

    command.main(["m", *argv], standalone_mode=False)
    return seen[0], seen[1]


def test_every_engine_argument_is_a_flag_with_its_help(cli: Run) -> None:
    text = " ".join(cli("explain", "--help")[1].split())
    for entry in dataclasses.fields(EngineArgs):
        assert (f"{flag(entry.name)} " in text) == entry.metadata["flag"], entry.name
        if entry.metadata["flag"]:
            assert entry.metadata["help"] in text


def test_flags_not_given_leave_the_defaults(cli: Run) -> None:
    kwargs, args = invoke("--prompt", "hi")
    assert kwargs == {}
    assert args == EngineArgs.create("m")


def test_flags_are_converted_by_type(cli: Run) -> None:
    kwargs, args = invoke(
        "--max-model-len", "64", "--gpu-memory-utilization", "0.5", "--enforce-eager", "--no-strict",
        "--hf-overrides", '{"text_config": {"head_dim": 8}}', "--runner", "pooling", "--no-trust-remote-code",
    )  # fmt: skip
    assert kwargs == {
        "max_model_len": 64,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "strict": False,
        "hf_overrides": {"text_config": {"head_dim": 8}},
        "runner": "pooling",
        "trust_remote_code": False,
    }
    assert args.max_model_len == 64


def test_flags_win_over_the_config_file(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[args]\nseed = 3\nenforce_eager = true\n")
    monkeypatch.setenv("MODELBAY_CONFIG", str(path))
    args = invoke("--no-enforce-eager")[1]
    assert (args.seed, args.enforce_eager) == (3, False)


@pytest.mark.parametrize(
    "argv", [["--runner", "chat"], ["--max-model-len", "x"], ["--hf-overrides", "[]"], ["--hf-overrides", "{"]]
)
def test_flags_with_wrong_values_are_usage_errors(cli: Run, argv: list[str]) -> None:
    with pytest.raises(click.UsageError):
        invoke(*argv)


# -- as a process


def test_python_m_works_and_a_closed_pipe_is_silent() -> None:
    command = [sys.executable, "-m", "modelbay", "--plugins", "", "config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_ends_in_one_line_and_130(tmp_path: Path) -> None:
    """The signal arrives while a plugin is being imported."""
    slow = "print('here', flush=True)\nimport time; time.sleep(60)"
    write_distribution(tmp_path, "acme-slow", {"acme_slow.py": slow})
    # A shell starts background jobs with the signal ignored, and children inherit that.
    code = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); import modelbay.cli.main as m; m.main()"
    command = [sys.executable, "-c", code, "--plugins", "slow", "list-archs"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_text_that_no_encoding_has_a_word_for_is_printed_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a character, out of a file or a name that is no UTF-8, ends no command, wherever it is printed."""
    for encoding in ("utf-8", "latin-1"):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        _print_everything()
        click.echo("a\ud800")
        print_json({"name": "a\udcff\u2026"})
        print_table(("name",), [("a\ud800\x1b[2J\nb",)])
        print_lines([[("a\udcff\x1b[2J", "bold"), ("\nb\u00e9", "")]])
        sys.stdout.flush()
        printed = raw.getvalue().decode(encoding)
        assert printed.startswith("a\\ud800\n{")
        assert json.loads(printed[printed.index("{") : printed.index("}") + 1]) == {"name": "a\udcff\u2026"}
        assert printed.endswith("}\nNAME\na\\ud800\\x1b[2J\\nb\na\\udcff\\x1b[2J\nb\u00e9\n")
