"""The rules of the plugin manager, on distributions laid out as pip would."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelbay import hookimpl, hookspecs
from modelbay.errors import PluginConflictError, PluginError, UsageError
from modelbay.plugins import TABLES, Plugins, load_plugins
from modelbay.registration import _CHECKS, RECORD_TYPES
from modelbay.specs import ArchSpec, KernelSpec
from modelbay.trace import Trace
from modelbay_testing.distributions import see_only, write_distribution

HEADER = """
from modelbay import hookimpl
from modelbay.specs import *
"""


def arch_plugin(*names: str, extra: str = "") -> str:
    listed = ", ".join(f"ArchSpec(name={name!r}, target='nowhere.model:Model')" for name in names)
    return f"{HEADER}\n@hookimpl\ndef register_architectures():\n    return [{listed}]\n{extra}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the only place where distributions are found; no settings from outside."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    see_only(monkeypatch, folder)
    for variable in ("MODELBAY_PLUGINS", "MODELBAY_PREFER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    return folder


@pytest.fixture
def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """``install("acme-foo", source)``: a distribution whose entry point ``foo`` is a module of that source."""

    def add(name: str, source: str, **kwargs: Any) -> Path:
        module = f"{name.replace('-', '_')}_plugin"
        monkeypatch.delitem(sys.modules, module, raising=False)
        return write_distribution(site, name, {f"{module}.py": source}, **kwargs)

    yield add
    for module in [name for name in sys.modules if name.endswith("_plugin")]:
        if getattr(sys.modules[module], "__file__", "").startswith(str(site)):
            del sys.modules[module]


def status(plugins: Plugins) -> dict[str, str]:
    return {record.name: record.status for record in plugins.records}


# -- selection


def test_core_is_always_loaded_and_needs_no_metadata(site: Path) -> None:
    plugins = load_plugins([])
    assert status(plugins) == {"core": "loaded"}
    assert {"safetensors", "pt", "dummy"} <= set(plugins.names("load_formats"))


def test_an_installed_plugin_is_found_with_its_owner(install: Callable[..., Path]) -> None:
    install("acme-foo", arch_plugin("FooForCausalLM"), version="2.5")
    plugins = load_plugins()
    owned = plugins.require("architectures", "FooForCausalLM", "architecture")
    assert (owned.owner.distribution, owned.owner.version, owned.owner.plugin) == ("acme-foo", "2.5", "foo")
    record = next(record for record in plugins.records if record.name == "foo")
    assert record.hooks == ("register_architectures",)
    assert record.offers == {"architectures": ("FooForCausalLM",)}


@pytest.mark.parametrize(
    ("env", "names", "loaded"),
    [
        (None, None, {"core", "bar", "foo"}),
        ("", None, {"core"}),
        ("foo", None, {"core", "foo"}),
        (" foo , bar,", None, {"core", "bar", "foo"}),
        ("foo", ["bar"], {"core", "bar"}),
        ("foo", [], {"core"}),
        (None, ["acme-foo"], {"core", "foo"}),
        (None, ["Acme_Foo"], {"core", "foo"}),
    ],
)
def test_selection_by_environment_and_argument(
    install: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    env: str | None,
    names: list[str] | None,
    loaded: set[str],
) -> None:
    install("acme-foo", arch_plugin("Foo"))
    install("acme-bar", arch_plugin("Bar"))
    if env is not None:
        monkeypatch.setenv("MODELBAY_PLUGINS", env)
    plugins = load_plugins(names)
    assert {name for name, state in status(plugins).items() if state == "loaded"} == loaded
    assert {name for name, state in status(plugins).items() if state == "disabled"} == {"core", "bar", "foo"} - loaded


def test_a_plugin_that_is_not_selected_is_not_imported(install: Callable[..., Path]) -> None:
    install("acme-foo", arch_plugin("Foo"))
    load_plugins([])
    assert "acme_foo_plugin" not in sys.modules


def test_unknown_names_warn_in_log_and_trace(install: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    install("acme-foo", arch_plugin("Foo"))
    trace = Trace()
    with caplog.at_level(logging.WARNING):
        load_plugins(["fooo"], trace=trace)
    assert "no plugin 'fooo' is installed; nearest: foo" in caplog.text
    assert [warning.question for warning in trace.warnings()] == ["plugin fooo"]


def test_names_must_be_a_list(site: Path) -> None:
    for wrong in ("foo", [3]):
        with pytest.raises(UsageError, match="list of names and modules"):
            load_plugins(wrong)  # type: ignore[arg-type]


# -- isolation

IMPORT_FAULTS = {
    "raises": ("raise ValueError('no good\\nat all')", "ValueError: no good at all"),
    "missing import": ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
    "syntax": ("def f(:", "SyntaxError: "),
    "exits": ("raise SystemExit('bye')", "SystemExit: bye"),
}


@pytest.mark.parametrize("fault", IMPORT_FAULTS)
def test_a_plugin_that_fails_to_import_is_skipped_with_a_warning(
    install: Callable[..., Path], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Case 2."""
    source, message = IMPORT_FAULTS[fault]
    install("acme-broken", source, version="3.1")
    install("acme-foo", arch_plugin("FooForCausalLM"))
    trace = Trace()
    with caplog.at_level(logging.WARNING):
        plugins = load_plugins(trace=trace)
    assert plugins.names("architectures") == ["FooForCausalLM"]
    assert status(plugins) == {"core": "loaded", "broken": "failed", "foo": "loaded"}
    assert [record.name for record in plugins.failed] == ["broken"]
    for text in (caplog.text, plugins.failed[0].error or ""):
        assert message in text
    assert "acme-broken 3.1 (entry point 'broken')" in caplog.text
    assert "\n" not in plugins.failed[0].error
    assert message in trace.warnings()[0].answer


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_here", "ModuleNotFoundError"),
        ("acme_broken_plugin:absent", "AttributeError"),
        ("not a module!", "ModuleNotFoundError"),
    ],
)
def test_a_bad_entry_point_target_is_a_failure(install: Callable[..., Path], target: str, message: str) -> None:
    install("acme-broken", "", entry_points={"broken": target})
    (failed,) = load_plugins().failed
    assert failed.name == "broken"
    assert message in (failed.error or "")


HOOK = "\n@hookimpl\ndef register_commands():\n    {}\n"
REGISTRATION_FAULTS = {
    "hook raises": (HOOK.format("raise KeyError('x')"), "KeyError: 'x'"),
    "hook exits": (HOOK.format("raise SystemExit(3)"), "SystemExit: 3"),
    "returns None": (HOOK.format("pass"), "it returned None"),
    "returns a string": (HOOK.format("return 'list-archs'"), "it returned str 'list-archs', not an iterable"),
    "returns one record": (
        HOOK.format("return CommandSpec(name='x', target='a:b', summary='')"),
        "not an iterable of records",
    ),
    "wrong type": (HOOK.format("return [{'name': 'x'}]"), "it returned dict {'name': 'x'} where a CommandSpec belongs"),
    "generator fails late": (
        HOOK.format("yield CommandSpec(name='late', target='a:b', summary=''); raise OSError('late')"),
        "OSError: late",
    ),
    "bad target": (
        HOOK.format("return [CommandSpec(name='x', target='a.b', summary='')]"),
        "CommandSpec 'x': target must be of the form \"package.module:object\", got 'a.b'",
    ),
    "empty name": (
        HOOK.format("return [CommandSpec(name='', target='a:b', summary='')]"),
        "name must be a non-empty string, got ''",
    ),
    "same name twice": (
        HOOK.format("return [CommandSpec(name='x', target='a:b', summary='')] * 2"),
        "it returned 'x' twice",
    ),
    "unknown hook": ("\n@hookimpl\ndef register_archs():\n    return []\n", "unknown hook 'register_archs'"),
    "unmarked hook": ("\ndef register_kernels():\n    return []\n", "register_kernels(): it is not marked with @model"),
    "unmarked unknown": ("\ndef register_archs():\n    return []\n", "is no hook of Modelbay"),
    "wrong signature": ("\n@hookimpl\ndef register_kernels(config):\n    return []\n", "register_kernels(config)"),
    "string for tuple": (
        "\n@hookimpl\ndef register_config_patches():\n"
        "    return [ConfigPatch(name='p', target='a:b', model_types='llama')]\n",
        "ConfigPatch 'p': model_types must be tuple[str, ...], got str 'llama'",
    ),
    "reserved name": (
        "\n@hookimpl\ndef register_load_formats():\n    return [LoadFormatSpec(name='auto', target='a:b')]\n",
        "this name is reserved",
    ),
    "bad constraint": (
        "\n@hookimpl\ndef register_kernels():\n"
        "    return [KernelSpec(set='s', op='o', target='a:b', devices=('cpu',), constraint='nope')]\n",
        "KernelSpec 'o': constraint must be of the form",
    ),
}


@pytest.mark.parametrize("fault", REGISTRATION_FAULTS)
def test_registration_is_atomic_and_the_fault_is_named(install: Callable[..., Path], fault: str) -> None:
    """Everything else the plugin offers is right, and still none of it counts."""
    source, message = REGISTRATION_FAULTS[fault]
    install("acme-broken", arch_plugin("BrokenForCausalLM", extra=source))
    install("acme-foo", arch_plugin("FooForCausalLM"))
    plugins = load_plugins()
    assert message in (plugins.failed[0].error or "")
    assert {owned.owner.plugin for table in TABLES for owned in plugins.all(table)} == {"core", "foo"}
    assert "broken" not in plugins.manifest()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tasks=('chat',)", "tasks must be some of generate, embed, classify, score"),
        ("tasks=()", "tasks must be some of"),
        ("contract=(2, 1)", "contract must be (lowest, highest), got (2, 1)"),
        ("contract=1", "contract must be tuple[int, int], got int 1"),
        ("transforms=[]", "transforms must be a tuple, got list []"),
        ("tp_plan=None", "tp_plan must be Mapping[str, str], got NoneType None"),
    ],
)
def test_architectures_are_validated(install: Callable[..., Path], arguments: str, message: str) -> None:
    hook = f"@hookimpl\ndef register_architectures():\n    return [ArchSpec(name='X', target='a:b', {arguments})]\n"
    install("acme-broken", HEADER + hook)
    assert message in (load_plugins().failed[0].error or "")


def test_registration_errors_state_plugin_hook_signature_and_fault(install: Callable[..., Path]) -> None:
    install("acme-broken", HEADER + HOOK.format("return 3"))
    assert load_plugins().failed[0].error == (
        "Plugin 'broken', hook 'register_commands', signature register_commands() -> Iterable[CommandSpec]: "
        "it returned int 3, not an iterable of records"
    )


@pytest.mark.parametrize("source", ["raise ValueError('no good')", HEADER + HOOK.format("raise ValueError('no good')")])
def test_strict_raises_with_the_cause(install: Callable[..., Path], source: str) -> None:
    install("acme-broken", source)
    with pytest.raises(PluginError, match=r"plugin 'broken' of acme-broken 1\.0 failed: ValueError: no good") as caught:
        load_plugins(strict=True)
    assert isinstance(caught.value.__cause__, ValueError)


def test_asking_for_what_only_a_failed_plugin_offers_names_its_failure(install: Callable[..., Path]) -> None:
    """Case 2."""
    install("acme-broken", arch_plugin("BrokenForCausalLM", extra=HOOK.format("raise ValueError('no good')")))
    install("acme-other", "raise ImportError('else')")
    with pytest.raises(PluginError) as caught:
        load_plugins().require("architectures", "BrokenForCausalLM", "architecture")
    message = str(caught.value)
    assert "no installed plugin offers the architecture 'BrokenForCausalLM'" in message
    assert "acme-broken 1.0 (entry point 'broken') offers it but failed to load: ValueError: no good" in message
    assert "else" not in message


def test_asking_for_the_unknown_mentions_plugins_that_failed_and_that_are_off(install: Callable[..., Path]) -> None:
    install("acme-broken", "raise ImportError('flash_attn')")
    install("acme-foo", arch_plugin("FooForCausalLM"))
    install("acme-off", arch_plugin("OffForCausalLM"))
    plugins = load_plugins(["foo", "broken"])
    assert plugins.get("architectures", "FoForCausalLM") is None
    with pytest.raises(PluginError) as caught:
        plugins.require("architectures", "FoForCausalLM", "architecture")
    message = str(caught.value)
    assert "Nearest: FooForCausalLM." in message
    assert "may offer it: acme-broken 1.0 (entry point 'broken'): ImportError: flash_attn." in message
    assert "not loaded (argument): off (acme-off)" in message


def test_broken_metadata_of_one_distribution_leaves_the_others(install: Callable[..., Path], site: Path) -> None:
    install("acme-foo", arch_plugin("FooForCausalLM"))
    for name, text in {"acme_bad": "[modelbay]\nno equals sign\n", "acme_worse": b"[modelbay]\n\xff = x\n"}.items():
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    plugins = load_plugins()
    assert plugins.names("architectures") == ["FooForCausalLM"]
    assert [record.distribution for record in plugins.failed] == ["acme_bad"]
    assert "entry_points.txt cannot be read" in (plugins.failed[0].error or "")


# -- order, state, processes


def test_nothing_depends_on_load_order(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zeta", "alpha", "mid"):
        install(f"acme-{name}", arch_plugin(f"{name.title()}ForCausalLM", "SharedForCausalLM"))
    install("acme-broken", "raise ValueError('x')")
    forward, trace_forward = load_plugins(trace=(one := Trace())), one.to_list()
    found = list(reversed(importlib.metadata.distributions()))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    backward, trace_backward = load_plugins(trace=(two := Trace())), two.to_list()
    assert forward.records == backward.records
    assert forward.manifest() == backward.manifest()
    assert trace_forward == trace_backward
    for table in TABLES:
        assert forward.all(table) == backward.all(table)
    assert [o.owner.plugin for o in forward.owners("architectures", "SharedForCausalLM")] == ["alpha", "mid", "zeta"]


def test_no_state_is_shared_between_calls(site: Path) -> None:
    assert load_plugins([in_process("mine", "MineForCausalLM")]).names("architectures") == ["MineForCausalLM"]
    assert load_plugins().names("architectures") == []


def test_manifest_names_entry_points_and_versions(install: Callable[..., Path]) -> None:
    from modelbay import __version__

    install("acme-foo", arch_plugin("FooForCausalLM"), version="2.5")
    install("other-foo", arch_plugin("OtherForCausalLM"), version="0.1")
    install("acme-off", arch_plugin("OffForCausalLM"))
    assert load_plugins(["foo"]).manifest() == {"core": f"modelbay {__version__}", "foo": "acme-foo 2.5, other-foo 0.1"}


# -- conflicts and choices


@pytest.fixture
def rivals(install: Callable[..., Path]) -> None:
    install("acme-foo", arch_plugin("FooForCausalLM"))
    install("rival-food", arch_plugin("FooForCausalLM"))


def owner_of(plugins: Plugins, name: str = "FooForCausalLM") -> str:
    owned = plugins.get("architectures", name)
    assert owned is not None
    return owned.owner.distribution


def test_two_owners_are_an_error_only_when_the_name_is_used(rivals: None) -> None:
    plugins = load_plugins()
    assert plugins.names("architectures") == ["FooForCausalLM"]
    with pytest.raises(PluginConflictError) as caught:
        plugins.get("architectures", "FooForCausalLM")
    message = str(caught.value)
    assert "acme-foo 1.0 (entry point 'foo') and rival-food 1.0 (entry point 'food')" in message
    assert "--prefer FooForCausalLM=acme-foo or --prefer FooForCausalLM=rival-food" in message


def test_preference_by_argument_over_environment_over_config_file(
    rivals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[prefer]\nFooForCausalLM = "acme-foo"\n')
    monkeypatch.setenv("MODELBAY_CONFIG", str(config))
    assert owner_of(load_plugins()) == "acme-foo"
    monkeypatch.setenv("MODELBAY_PREFER", "Other=x, FooForCausalLM=Rival_Food")
    assert owner_of(load_plugins()) == "rival-food"
    assert owner_of(load_plugins(prefer={"FooForCausalLM": "acme-foo"})) == "acme-foo"


def test_preferring_who_does_not_offer_it_is_an_error(rivals: None, install: Callable[..., Path]) -> None:
    install("acme-broken", "raise ValueError('no good')")
    hints = {"nobody": "Prefer one of these", "acme-broken": "failed to load: ValueError: no good"}
    for preferred, hint in hints.items():
        plugins = load_plugins(prefer={"FooForCausalLM": preferred})
        with pytest.raises(PluginError) as caught:
            plugins.get("architectures", "FooForCausalLM")
        assert "does not offer it; offered by: acme-foo 1.0, rival-food 1.0" in str(caught.value)
        assert hint in str(caught.value)


def test_a_preference_for_one_table_leaves_the_same_name_in_another(install: Callable[..., Path]) -> None:
    command = "\n@hookimpl\ndef register_commands():\n    return [CommandSpec(name='foo', target='a:b', summary='')]\n"
    install("acme-foo", arch_plugin("foo", extra=command))
    install("rival-food", arch_plugin("foo"))
    plugins = load_plugins(prefer={"foo": "rival-food"})
    assert owner_of(plugins, "foo") == "rival-food"
    assert plugins.require("commands", "foo", "command").owner.distribution == "acme-foo"


@pytest.mark.parametrize("text", ["Foo", "=acme", "Foo=", "Foo=a,Foo=b"])
def test_malformed_preferences_name_their_source(site: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MODELBAY_PREFER", text)
    with pytest.raises(UsageError, match="MODELBAY_PREFER"):
        load_plugins()


def test_a_distribution_found_twice_on_the_path_is_no_conflict(
    install: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install("acme-foo", arch_plugin("FooForCausalLM"), version="2.0")
    older = write_distribution(tmp_path / "older", "acme.foo", {"acme_foo_plugin.py": ""}, version="1.0")
    see_only(monkeypatch, site, older)
    plugins = load_plugins()
    assert status(plugins) == {"core": "loaded", "foo": "loaded"}
    assert plugins.get("architectures", "FooForCausalLM").owner.version == "2.0"


def test_two_entry_points_on_one_module_are_no_conflict(install: Callable[..., Path]) -> None:
    points = {"foo": "acme_foo_plugin", "foo2": "acme_foo_plugin"}
    install("acme-foo", arch_plugin("FooForCausalLM"), entry_points=points)
    assert owner_of(load_plugins()) == "acme-foo"


def test_one_distribution_at_odds_with_itself_is_settled_by_entry_point(
    install: Callable[..., Path], site: Path
) -> None:
    points = {"foo": "acme_foo_plugin", "bar": "acme_bar_plugin"}
    install("acme-foo", arch_plugin("FooForCausalLM"), entry_points=points)
    (site / "acme_bar_plugin.py").write_text(arch_plugin("FooForCausalLM").replace("nowhere", "elsewhere"))
    with pytest.raises(PluginConflictError, match="--prefer FooForCausalLM=bar or --prefer FooForCausalLM=foo"):
        load_plugins().get("architectures", "FooForCausalLM")
    owned = load_plugins(prefer={"FooForCausalLM": "bar"}).get("architectures", "FooForCausalLM")
    assert owned.owner.plugin == "bar"


def test_several_kernels_for_one_op_are_the_point(site: Path) -> None:
    module = ModuleType("kernels_here")

    @hookimpl
    def register_kernels() -> list[KernelSpec]:
        return [KernelSpec(set=name, op="rms_norm", target="a:b", devices=("cpu",)) for name in ("one", "two")]

    module.register_kernels = register_kernels  # type: ignore[attr-defined]
    plugins = load_plugins([module])
    assert {owned.value.set for owned in plugins.owners("kernels", "rms_norm")} == {"one", "two"}


# -- in-process modules


def in_process(name: str, *archs: str) -> ModuleType:
    module = ModuleType(name)

    @hookimpl
    def register_architectures() -> list[ArchSpec]:
        return [ArchSpec(name=arch, target="nowhere:Model") for arch in archs]

    module.register_architectures = register_architectures  # type: ignore[attr-defined]
    return module


def test_a_module_adds_to_the_installed_plugins(install: Callable[..., Path]) -> None:
    install("acme-foo", arch_plugin("FooForCausalLM"))
    plugins = load_plugins([in_process("mine", "MineForCausalLM")])
    assert plugins.names("architectures") == ["FooForCausalLM", "MineForCausalLM"]
    owner = plugins.require("architectures", "MineForCausalLM", "architecture").owner
    assert (owner.distribution, owner.plugin, str(owner)) == ("(in-process)", "mine", "(in-process)")
    assert load_plugins([in_process("mine", "Mine"), "core"]).names("architectures") == ["Mine"]


def test_a_module_can_be_preferred_by_its_name(install: Callable[..., Path]) -> None:
    install("acme-foo", arch_plugin("FooForCausalLM"))
    mine = in_process("mine", "FooForCausalLM")
    with pytest.raises(PluginConflictError, match="--prefer FooForCausalLM=mine"):
        load_plugins([mine]).get("architectures", "FooForCausalLM")
    assert owner_of(load_plugins([mine], prefer={"FooForCausalLM": "mine"})) == "(in-process)"


def test_a_module_that_an_entry_point_already_brings_is_not_loaded_twice(install: Callable[..., Path]) -> None:
    install("acme-foo", arch_plugin("FooForCausalLM"))
    import acme_foo_plugin  # type: ignore[import-not-found]

    assert status(load_plugins([acme_foo_plugin])) == {"core": "loaded", "foo": "loaded"}
    alone = load_plugins([acme_foo_plugin, "core"])
    assert owner_of(alone) == "acme-foo"


def test_a_faulty_module_given_by_the_caller_is_an_error(site: Path) -> None:
    module = ModuleType("faulty")
    module.register_architectures = hookimpl(lambda: [3])  # type: ignore[attr-defined]
    with pytest.raises(
        PluginError, match=r"plugin 'faulty' of \(in-process\) failed: .*int 3 where a ArchSpec belongs"
    ):
        load_plugins([module])


# -- the tables and the hooks say the same


def test_tables_hooks_and_record_types_agree() -> None:
    hooks = {name.removeprefix("register_") for name in vars(hookspecs) if name.startswith("register_")}
    assert hooks == set(TABLES) == set(RECORD_TYPES)
    for table, key in TABLES.items():
        assert key in {entry.name for entry in dataclasses.fields(RECORD_TYPES[table])}


def test_every_field_of_every_record_is_checked() -> None:
    annotations = {str(entry.type) for kind in RECORD_TYPES.values() for entry in dataclasses.fields(kind)}
    assert annotations - set(_CHECKS) == {"tuple[Transform, ...]"}


def test_the_trace_says_what_was_loaded_and_what_was_not(install: Callable[..., Path]) -> None:
    install("acme-foo", arch_plugin("FooForCausalLM"))
    install("acme-broken", "raise ValueError('x')")
    install("acme-off", arch_plugin("Off"))
    trace = Trace()
    load_plugins(["foo", "broken"], trace=trace)
    decision = trace.find("loaded", "plugins")
    assert decision is not None
    assert decision.answer["foo"] == "acme-foo 1.0"
    assert decision.source == "argument"
    assert {rejected.reason for rejected in decision.rejected} == {"failed: ValueError: x", "not selected (argument)"}
