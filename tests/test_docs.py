"""The documentation says what is true: every hook, field, command and flag is there, and what it shows runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from modelbay import hookspecs
from modelbay.args import EngineArgs
from modelbay.cli.group import build_group
from modelbay.registration import RECORD_TYPES, read_plugin
from modelbay.registry import TABLES
from modelbay_testing.assets import or_skip, smollm2_gguf
from modelbay_testing.isolation import FreshVenv, fresh_venv
from modelbay_testing.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MODEL = ".cache/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the title where it has one, and the text."""

    language: str
    title: str | None
    text: str


def blocks(page: Path, text: str | None = None) -> list[Block]:
    source = page.read_text(encoding="utf-8") if text is None else text
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', source, re.MULTILINE | re.DOTALL)
    return [Block(language, title or None, body) for language, title, body in found]


def section(page: Path, heading: str) -> str:
    """The text under a second-level heading."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page.read_text(encoding="utf-8"), re.M | re.S)
    assert match, f"{page.relative_to(ROOT)} has no section '## {heading}'"
    return match[1]


def write_files(page: Path, folder: Path) -> list[str]:
    """Write every block that has a title to the file of that name."""
    titled = [block for block in blocks(page) if block.title]
    for block in titled:
        write_block(block, folder)
    return [str(block.title) for block in titled]


def write_block(block: Block, folder: Path) -> None:
    path = folder / str(block.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


def as_module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


# --- hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_hook_is_documented_with_its_sentence_fields_and_example(table: str) -> None:
    """Every hook stands on the hooks page, and its example is a plugin that registers."""
    hook, record = f"register_{table}", RECORD_TYPES[table]
    text = section(DOCS / "reference" / "hooks.md", hook)
    sentence = str(getattr(hookspecs, hook).__doc__).strip()
    assert text.strip().startswith(sentence)
    fields = re.findall(r"^\| `(\w+)` \| \S", text, re.M)[1:]  # the first is the table's head, the record's name
    assert fields == [entry.name for entry in dataclasses.fields(record)]
    assert f"| `{record.__name__}` | meaning |" in text
    [example] = [block for block in blocks(DOCS, text) if block.language == "python"]
    registration = read_plugin(as_module("acme_tinylm.plugin", example.text), "acme")
    assert registration.error is None
    assert registration.hooks == (hook,)
    assert [type(value) for value in registration.records[table]] == [record]


def test_hooks_page_has_no_hook_that_does_not_exist() -> None:
    headings = re.findall(r"^## (register_\w+)", (DOCS / "reference" / "hooks.md").read_text(encoding="utf-8"), re.M)
    assert set(headings) == {f"register_{table}" for table in TABLES}
    assert set(headings) == {name for name in vars(hookspecs) if name.startswith("register_")}


# --- command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    return (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")


def walk_commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name, the group itself first."""
    group = build_group()
    with group.make_context("modelbay", [], resilient_parsing=True) as ctx:
        yield "modelbay", group
        for name in group.list_commands(ctx):
            command = group.get_command(ctx, name)
            assert command is not None
            yield f"modelbay {name}", command
            for sub in command.commands.values() if isinstance(command, click.Group) else ():
                yield f"modelbay {name} {sub.name}", sub


def test_every_command_and_flag_is_documented() -> None:
    page = cli_page()
    for name, command in walk_commands():
        assert command.help, f"{name} has no help"
        assert name == "modelbay" or f"### `{name}`" in page, f"{name} is not on the page"
        for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
            assert option.help, f"{name} {option.opts[0]} has no help"
            for flag in (*option.opts, *option.secondary_opts):
                assert re.search(rf"`{re.escape(flag)}[` ]", page), f"{name} {flag} is not on the page"


def test_every_engine_argument_is_a_documented_flag() -> None:
    engine = cli_page().partition("## Engine arguments")[2]
    for entry in dataclasses.fields(EngineArgs):
        if entry.metadata["flag"]:
            assert f"`--{entry.name.replace('_', '-')}" in engine, entry.name
            assert " ".join(entry.metadata["help"].split()).replace("|", "\\|") in engine, entry.name


def test_cli_reference_is_what_the_commands_say() -> None:
    spec = importlib.util.spec_from_file_location("gen_cli", DOCS / "gen_cli.py")
    assert spec is not None
    assert spec.loader is not None
    gen_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_cli)
    assert gen_cli.page_with(gen_cli.render()) == cli_page(), "run `make reference`"


# --- architecture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "package"),
    [("Core", "core/modelbay"), ("Runtime", "backends/runtime/src/modelbay_runtime")],
)
def test_architecture_page_lists_the_rooms_there_are(heading: str, package: str) -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    match = re.search(rf"^### {heading}: `{re.escape(package)}`\n(.*?)(?=^###? )", page, re.M | re.S)
    assert match, f"no section on {package}"
    named = set(re.findall(r"`(\w+)`", match[1]))
    paths = (ROOT / package).iterdir()
    rooms = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    rooms -= {"__init__", "__main__"}
    assert rooms <= named, f"not on the page: {sorted(rooms - named)}"
    listed = set(re.findall(r"^\| `(\w+)` \|", match[1], re.M))
    assert listed <= rooms, f"on the page but gone: {sorted(listed - rooms)}"


def test_architecture_page_lists_every_dependency_with_licence_and_reason() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section(DOCS / "architecture.md", "Dependencies"), re.M
    )
    listed = {name.strip().lower().replace("_", "-") for row in rows[2:] for name in row[0].split(",")}
    assert all(cell.strip() for row in rows for cell in row)
    declared: set[str] = set()
    projects = [
        ROOT / "pyproject.toml",
        *ROOT.glob("backends/*/pyproject.toml"),
        *ROOT.glob("plugins/*/pyproject.toml"),
    ]
    for project in [*projects, ROOT / "tests" / "kit" / "pyproject.toml"]:
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = table.get("optional-dependencies", {}).values()
        declared |= {requirement_name(text) for text in [*table["dependencies"], *(t for e in extras for t in e)]}
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    declared |= {requirement_name(line) for line in lines if re.match(r"\w", line)}
    declared = {name for name in declared if not name.startswith("modelbay")}
    assert listed == declared


def requirement_name(text: str) -> str:
    match = re.match(r"[\w.-]+", text)
    assert match, text
    return match[0].lower().replace("_", "-")


def test_rules_that_code_and_tests_name_are_on_the_behaviour_page() -> None:
    page = (DOCS / "behaviour.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| ([A-Z]\d+) \|", page, re.M))
    named: dict[str, str] = {}
    for folder in ("core", "backends", "plugins", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            rules = re.findall(r"BEHAVIOUR ([A-Z]\d+)", text) + [
                r.upper() for r in re.findall(r"def test_([a-z]\d+)_", text)
            ]
            named |= {rule: str(path.relative_to(ROOT)) for rule in rules}
    assert not {rule: path for rule, path in named.items() if rule not in known}


# --- links and the site ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
        assert "://" in target or (ROOT / target).exists(), target


def test_readme_lists_every_member(members: list[Path]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for member in members[1:]:
        assert f"| `{member.relative_to(ROOT)}` |" in readme


def test_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "CappedForCausalLM" in (tmp_path / "site" / "tutorial" / "index.html").read_text(encoding="utf-8")
    assert "block_size" in (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")


# --- what the pages show, run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
)
def test_commands_shown_exist_with_the_flags_they_are_given(page: str) -> None:
    known = dict(walk_commands())
    everywhere = {flag for parameter in known["modelbay"].params for flag in parameter.opts} | {"--help"}
    for block in blocks(ROOT / page):
        for line in block.text.splitlines() if block.language == "console" else []:
            if not line.startswith("$ modelbay "):
                continue
            words = shlex.split(line.split(" | ")[0].removeprefix("$ "), comments=True)
            while words[1] in ("--debug", "--strict-plugins"):  # a global option before the command
                del words[1]
            command = known.get(" ".join(words[:3])) or known.get(" ".join(words[:2]))
            assert command is not None, line
            flags = {f for p in command.params for f in (*p.opts, *p.secondary_opts)} | everywhere
            assert {word for word in words[2:] if word.startswith("-")} <= flags, line


def wheels_for(wheel: Callable[[str], Path]) -> list[Path]:
    members = (".", "backends/runtime", "plugins/llama", "plugins/gguf", "tests/kit")
    return [wheel(member) for member in members]


def test_readme_plugin_serves_the_checkpoint_it_is_about(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    """The whole plugin of the README, built and installed, against Transformers' Llama with the same weights."""
    titles = write_files(ROOT / "README.md", tmp_path)
    assert "modelbay-yi/pyproject.toml" in titles
    shown = sum(len(b.text.split("\n")) - 1 for b in blocks(ROOT / "README.md") if b.title and "modelbay-yi" in b.title)
    assert shown <= 40, "it is shown as a small plugin"
    checkpoint = tiny_checkpoint(tmp_path / "yi", "llama", seed=3)
    expected = greedy_by_transformers(checkpoint, "The quick brown fox", 12)
    relabel_as_yi(checkpoint)

    venv = fresh_venv(tmp_path / "venv", wheels_for(wheel))
    venv.pip("install", "--no-index", "--no-build-isolation", "--quiet", tmp_path / "modelbay-yi")
    listed = venv.run("modelbay", "list-archs", "--model-type", "Yi").stdout
    assert re.search(r"YiForCausalLM +generate +modelbay-yi 0\.1\.0", listed)
    script = (
        "from modelbay import LLM, SamplingParams\n"
        f"with LLM({str(checkpoint)!r}, dtype='float32', device='cpu') as llm:\n"
        "    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)\n"
        "    print(llm.generate('The quick brown fox', params, use_tqdm=False)[0].outputs[0].token_ids)\n"
    )
    assert [int(number) for number in re.findall(r"\d+", venv.run("python", "-c", script).stdout)] == expected


def greedy_by_transformers(checkpoint: Path, prompt: str, tokens: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint)(prompt)["input_ids"]])
    output = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return output[0, ids.shape[1] :].tolist()


def relabel_as_yi(checkpoint: Path) -> None:
    """Rename tensors and types as the first Yi checkpoints have them."""
    import json

    from safetensors.torch import load_file, save_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config.update(model_type="Yi", architectures=["YiForCausalLM"])
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {
        name.replace(".input_layernorm.", ".ln1.").replace(".post_attention_layernorm.", ".ln2."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, checkpoint / "model.safetensors", metadata={"format": "pt"})


def test_conformance_example_of_the_how_to_is_a_valid_subclass() -> None:
    [example] = [block for block in blocks(DOCS / "how-to" / "write-a-plugin.md") if block.title]
    conformance = as_module("test_acme", example.text).TestAcme
    assert importlib.import_module(conformance.plugin)
    assert set(conformance.variants) == {"plain", "tied", "one kv head"}


def test_files_shown_are_clean_where_their_reader_writes_them(tmp_path: Path) -> None:
    """The Python files of README and tutorial, in a folder of one's own, by the rules that this house keeps itself."""
    shown = {title for name in ("README.md", "docs/tutorial.md") for title in write_files(ROOT / name, tmp_path)}
    assert "capped/tests/test_capped.py" in shown
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]["select"]
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--select", ",".join(rules)], ["format", "--check"]):
        words = [*ruff, *command, "--isolated", "--no-cache", "--line-length", "120", "."]
        result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_tutorial_leaves_the_checkout_before_it_writes_anything() -> None:
    """`make lint` looks at every file in the checkout, and what the tutorial makes is not of the house."""
    before_files = [block.text for block in itertools.takewhile(lambda b: not b.title, blocks(DOCS / "tutorial.md"))]
    moves = re.findall(r"^\$ cd (.+)$", "".join(before_files), re.M)
    assert moves
    assert not (ROOT / moves[-1]).resolve().is_relative_to(ROOT)


@pytest.mark.deep
@pytest.mark.real
def test_readme_installs_what_it_takes_to_generate(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    """The members of the README's `pip install`, and no others, run the demo's model."""
    [paths] = re.findall(r"^\$ pip install (\. .+)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    model = or_skip(smollm2_gguf)
    venv = fresh_venv(tmp_path / "venv", [wheel(os.path.normpath(path)) for path in paths.split()])
    greedy = ["--chat", "--dtype", "float32", "--max-tokens", "8", "--temperature", "0"]
    answer = venv.run("modelbay", "generate", model, *greedy, "--prompt", "What is the capital of France?").stdout
    assert "Paris" in answer


#: Commands of the tutorial that the test stands in for: the checkout it runs from already is what they make.
STOOD_IN_FOR = {"make demo", "source .venv/bin/activate"}


def test_tutorial_plugin_registers() -> None:
    """The quick half of the tutorial's test: its plugin is valid, its files parse, its names fit together."""
    files = {block.title: block.text for block in blocks(DOCS / "tutorial.md") if block.title}
    plugin = as_module("modelbay_capped.plugin", files["capped/src/modelbay_capped/plugin.py"])
    registration = read_plugin(plugin, "capped")
    assert registration.error is None
    [arch] = registration.records["architectures"]
    module, _, name = arch.target.partition(":")
    assert f"capped/src/{module.replace('.', '/')}.py" in files
    assert hasattr(as_module(module, files["capped/src/modelbay_capped/model.py"]), name)
    project = tomllib.loads(files["capped/pyproject.toml"])
    assert project["project"]["entry-points"]["modelbay"] == {"capped": "modelbay_capped.plugin"}


@pytest.mark.deep
@pytest.mark.real
def test_tutorial_runs_as_written(wheel: Callable[[str], Path], tmp_path: Path) -> None:
    """Every file and every command of the tutorial, in order, in a fresh environment, with the output it shows."""
    page = DOCS / "tutorial.md"
    model = or_skip(smollm2_gguf)
    folder = tmp_path / "checkout"
    (folder / MODEL).parent.mkdir(parents=True)
    (folder / MODEL).symlink_to(model)
    members = [wheel(member) for member in ("plugins/qwen2", "backends/triton")]
    venv = fresh_venv(tmp_path / "venv", [*wheels_for(wheel), *members])
    for block in blocks(page):
        if block.title:
            write_block(block, folder)
        elif block.language == "console":
            folder = run_console(block.text, venv, folder)


def run_console(text: str, venv: FreshVenv, folder: Path) -> Path:
    """Run each ``$`` line; the lines below it must be in its output, where ``…`` stands for anything.

    Returns:
        The folder in which the next one runs.
    """
    for command, _, shown in (part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.M) if part.strip()):
        if command in STOOD_IN_FOR:
            continue
        words = shlex.split(command)
        if words[0] == "cd":
            folder = (folder / words[1]).resolve(strict=True)
            continue
        if words[0] in ("mkdir", "cp"):
            subprocess.run(words, cwd=folder, check=True)
            continue
        if words[:2] == ["pip", "install"]:
            # Not editable and without an index: the build tools are the ones installed here.
            paths = [folder / word for word in words[2:] if not word.startswith("-")]
            venv.pip("install", "--no-index", "--no-build-isolation", "--quiet", *paths)
            continue
        assert words[0] in ("modelbay", "python", "pytest"), f"the tutorial's test cannot run {command!r}"
        result = in_folder(venv, words, folder)
        printed = " ".join(f"{result.stdout} {result.stderr}".split())
        for line in shown.splitlines():
            for piece in filter(None, (" ".join(piece.split()) for piece in line.split("…"))):
                assert piece in printed, f"$ {command}\nshows {piece!r}, but printed:\n{result.stdout}\n{result.stderr}"
    return folder


def in_folder(venv: FreshVenv, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    launcher = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
    program = {"python": [str(venv.python)], "pytest": [str(venv.python), "-m", "pytest", "-p", "no:cacheprovider"]}
    command = [*program.get(words[0], [str(venv.bin / words[0])]), *words[1:]]
    return venv.run("python", "-c", launcher, folder, *command)


def test_python_names_in_the_documentation_exist() -> None:
    """``from modelbay… import …`` in any page's Python block."""
    import modelbay

    names: set[tuple[str, str]] = set()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for block in blocks(page):
            if block.language == "python":
                for module, imported in re.findall(r"^\s*from (modelbay[\w.]*) import ([\w, ]+)$", block.text, re.M):
                    names |= {(module, name.strip()) for name in imported.split(",")}
    ours = {(module, name) for module, name in names if not module.startswith(("modelbay_capped", "modelbay_yi"))}
    assert ("modelbay", "LLM") in ours
    for module, name in sorted(ours):
        found: Any = importlib.import_module(module)
        assert hasattr(found, name), f"{module}.{name}"
    assert set(modelbay.__all__) >= {"LLM", "SamplingParams", "resolve"}
