"""The hallway from arguments to a Resolution: choice of the backend (A1), quantisation (C11), settings, the trace."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import modelbay
from modelbay import hookimpl, resolve
from modelbay.args import EngineArgs
from modelbay.backends import Verdict, backends
from modelbay.errors import ArchitectureError, BackendError, ConfigError, PluginError, UsageError
from modelbay.plugins import load_plugins
from modelbay.resolve import engine_args, resolve_args
from modelbay.settings import load_settings
from modelbay.specs import ArchSpec, BackendSpec, KernelSpec, LoadFormatSpec, QuantizationSpec
from modelbay.trace import Trace


class Fake:
    """A backend of a test: says what its class attribute says, and remembers that it was asked."""

    verdict: Verdict | Exception = Verdict(True, "it is registered")

    def assess(self, files: Any, config: Any, arch: Any, args: Any, plugins: Any) -> Verdict:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The config of the model that every reference leads to; a test changes it."""
    config = SimpleNamespace(
        sources={},
        architectures=("FooForCausalLM",),
        model_type="foo",
        raw={},
        text=SimpleNamespace(),
        quantization=None,
        checkpoint_dtype="bfloat16",
    )
    seen: dict[str, Any] = {}

    def find_files(reference: str, *, revision: Any, file_suffixes: Any, trace: Trace) -> Any:
        seen.update(reference=reference, revision=revision, file_suffixes=file_suffixes)
        trace.decide("source", "files", reference, "test")
        return SimpleNamespace(commit=None, path=lambda name: None)

    def load_config(files: Any, plugins: Any, args: Any, trace: Trace) -> Any:
        trace.decide("config", "model_type", config.model_type, "test")
        return config

    monkeypatch.setattr("modelbay.source.find_files", find_files)
    monkeypatch.setattr("modelbay.config.load_config", load_config)
    for variable in ("MODELBAY_PLUGINS", "MODELBAY_PREFER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    return SimpleNamespace(config=config, seen=seen)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``plugin(native=Verdict(…), other=error)`` as the only plugin beside the core; extra records by table."""

    def make(archs: tuple[str, ...] = ("FooForCausalLM",), records: Any = (), **verdicts: Any) -> list[Any]:
        module = ModuleType("fake_plugin")
        specs = []
        for order, (name, verdict) in enumerate(verdicts.items()):
            setattr(module, name, type(name, (Fake,), {"verdict": verdict}))
            specs.append(BackendSpec(name=name, target=f"fake_plugin:{name}", order=-order))
        tables: dict[str, list[Any]] = {
            "architectures": [ArchSpec(name=name, target="nowhere:Model", model_types=("foo",)) for name in archs],
            "modeling_backends": specs,
            **dict(records),
        }
        for table, values in tables.items():
            setattr(module, f"register_{table}", hookimpl(lambda values=values: values, specname=f"register_{table}"))
        monkeypatch.setitem(sys.modules, "fake_plugin", module)
        return ["core", module]

    return make


YES, NO = Verdict(True, "it is registered"), Verdict(False, "its attention is unknown.")


def test_a_resolution_holds_every_stage(model: Any, plugin: Any) -> None:
    resolution = resolve("org/foo", plugins=plugin(native=YES), revision="v1", max_model_len=8)
    assert (resolution.task, resolution.architecture, resolution.backend) == ("generate", "FooForCausalLM", "native")
    assert resolution.arch.name == "FooForCausalLM"
    assert resolution.owner.plugin == "fake_plugin"
    assert resolution.args.max_model_len == 8
    assert model.seen["revision"] == "v1"
    assert list(dict.fromkeys(d.stage for d in resolution.trace)) == [
        "plugins",
        "source",
        "config",
        "architectures",
        "backends",
    ]
    with pytest.raises(AttributeError):
        resolution.backend = "other"  # type: ignore[misc]


def test_the_public_names_are_functions_even_after_their_modules_were_imported() -> None:
    assert "modelbay.resolve" in sys.modules
    assert modelbay.resolve is resolve
    assert callable(modelbay.architectures)
    assert callable(modelbay.backends)


def test_a1_auto_takes_the_first_in_order_that_can(model: Any, plugin: Any) -> None:
    resolution = resolve("m", plugins=plugin(late=YES, middle=YES, first=NO))
    assert resolution.backend == "middle"
    assert [candidate.backend for candidate in resolution.candidates] == ["first", "middle", "late"]
    rejected = {entry.option: entry.reason for entry in resolution.trace.find("backend").rejected}
    assert rejected["first"] == NO.reason
    assert "middle comes first" in rejected["late"]


def test_a1_a_named_backend_never_falls_back(model: Any, plugin: Any) -> None:
    assert resolve("m", plugins=plugin(late=YES, first=YES), model_impl="late").backend == "late"
    with pytest.raises(BackendError, match=r"model_impl=first cannot build .*: first: its attention is unknown\.$"):
        resolve("m", plugins=plugin(late=YES, first=NO), model_impl="first")


def test_a1_a_backend_that_extends_another_answers_to_its_name_too(
    model: Any, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it, never before it; and it keeps a name of its own."""

    def specs(base: Verdict, more: Verdict) -> list[Any]:
        loaded = plugin(other=YES)
        for name, verdict in (("base", base), ("more", more)):
            monkeypatch.setattr(loaded[1], name, type(name, (Fake,), {"verdict": verdict}), raising=False)
        records = [
            BackendSpec(name="more", target="fake_plugin:more", order=20, extends="base"),
            BackendSpec(name="base", target="fake_plugin:base", order=10),
            BackendSpec(name="other", target="fake_plugin:other", order=5),
        ]
        monkeypatch.setattr(
            loaded[1], "register_modeling_backends", hookimpl(lambda: records, specname="register_modeling_backends")
        )
        return loaded

    assert resolve("m", plugins=specs(YES, YES), model_impl="base").backend == "base"
    resolution = resolve("m", plugins=specs(NO, YES), model_impl="base")
    assert resolution.backend == "more"
    rejected = {entry.option: entry.reason for entry in resolution.trace.find("backend").rejected}
    assert rejected == {"base": NO.reason, "other": "it could (it is registered), but more was asked for"}
    assert resolve("m", plugins=specs(YES, YES), model_impl="more").backend == "more"
    with pytest.raises(
        BackendError, match=r"model_impl=base cannot build .*: base: .*; more: its attention is unknown"
    ):
        resolve("m", plugins=specs(NO, NO), model_impl="base")


def test_a1_an_unknown_backend_lists_the_installed(model: Any, plugin: Any) -> None:
    with pytest.raises(UsageError, match=r"unknown model_impl 'natve'; installed: auto, native.*Nearest: native"):
        resolve("m", plugins=plugin(native=YES), model_impl="natve")


def test_a1_nobody_can_lists_every_reason_and_the_nearest_names(model: Any, plugin: Any) -> None:
    model.config.architectures = ("FoForCausalLM",)
    with pytest.raises(ArchitectureError) as caught:
        resolve("m", plugins=plugin(late=Verdict(False, "nobody registers it"), first=NO))
    message = str(caught.value)
    assert "'FoForCausalLM' (model_type 'foo')" in message
    assert "first: its attention is unknown; late: nobody registers it." in message
    assert "Nearest: FooForCausalLM." in message


def test_without_any_backend_it_says_so(model: Any, plugin: Any) -> None:
    with pytest.raises(BackendError, match="no modelling backend is installed"):
        resolve("m", plugins=plugin())


def test_a_backend_that_breaks_is_a_reason_and_when_named_an_error(model: Any, plugin: Any) -> None:
    """Case 3."""
    loaded = plugin(late=YES, first=KeyError("layers"))
    resolution = resolve("m", plugins=loaded)
    assert resolution.backend == "late"
    assert resolution.candidates[0].verdict.reason == "it failed: KeyError: 'layers'"
    with pytest.raises(KeyError):
        resolve("m", plugins=loaded, model_impl="first")


def test_a_backend_whose_code_is_absent_is_a_reason_with_the_import_error(model: Any, plugin: Any) -> None:
    """Case 3."""
    records = [("modeling_backends", [BackendSpec(name="gone", target="no_such_module:Backend")])]
    loaded = plugin(records=records)
    with pytest.raises(BackendError, match=r"gone: it failed: .*ModuleNotFoundError: No module named 'no_such_module'"):
        resolve("m", plugins=loaded)
    with pytest.raises(PluginError, match="no_such_module"):
        resolve("m", plugins=loaded, model_impl="gone")


OFFERED = [("quantizations", [QuantizationSpec(method="fp8", summary="dequantised while streaming")])]


def test_c11_a_method_that_nobody_offers_is_refused(model: Any, plugin: Any) -> None:
    model.config.quantization = {"quant_method": "awq"}
    with pytest.raises(ConfigError) as caught:
        resolve("m", plugins=plugin(native=YES, records=OFFERED))
    assert "quantization_config.quant_method is 'awq', which no installed plugin offers" in str(caught.value)
    assert "(installed: fp8)" in str(caught.value)


def test_c11_an_offered_method_is_traced(model: Any, plugin: Any) -> None:
    model.config.quantization = {"quant_method": "fp8"}
    trace = resolve("m", plugins=plugin(native=YES, records=OFFERED)).trace
    assert trace.find("quantization method").answer == "fp8 (dequantised while streaming)"


def test_c11_contradictions_and_absent_methods_are_errors(model: Any, plugin: Any) -> None:
    loaded = plugin(native=YES, records=OFFERED)
    with pytest.raises(UsageError, match="no installed plugin offers the quantization method 'awq'"):
        resolve("m", plugins=loaded, quantization="awq")
    with pytest.raises(UsageError, match=r"quantization='fp8', but the checkpoint is not quantised: its config has no"):
        resolve("m", plugins=loaded, quantization="fp8")
    model.config.quantization = {"quant_method": "fp8"}
    with pytest.raises(UsageError, match="quantization='awq', but the checkpoint is quantised with 'fp8'"):
        resolve("m", plugins=loaded, quantization="awq")
    model.config.quantization = {"bits": 4}
    with pytest.raises(ConfigError, match=r"has no quant_method \(its keys: bits\)"):
        resolve("m", plugins=loaded)


def test_only_formats_that_carry_a_config_may_be_single_files(model: Any, plugin: Any) -> None:
    one = LoadFormatSpec(name="one", target="a:b", suffixes=(".one",), config="a:read")
    resolve("m", plugins=plugin(native=YES, records=[("load_formats", [one])]))
    assert model.seen["file_suffixes"] == (".one",)


def test_an_unknown_argument_names_the_nearest(model: Any) -> None:
    with pytest.raises(UsageError, match=r"unknown engine argument 'max_model_length'.*'max_model_len'"):
        resolve("m", max_model_length=3)


def test_an_argument_that_is_none_is_not_said() -> None:
    assert EngineArgs.create("m", seed=None, dtype=None, max_model_len=None) == EngineArgs.create("m")


def test_a_trace_given_in_keeps_what_was_decided_before_a_failure(model: Any, plugin: Any) -> None:
    trace = Trace()
    args = engine_args("m", {"plugins": plugin(native=NO)}, load_settings(), trace)
    with pytest.raises(BackendError):
        resolve_args(args, trace=trace)
    assert {decision.stage for decision in trace} == {"plugins", "source", "config", "architectures"}


# -- the config file


@pytest.fixture
def config_file(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text)
        monkeypatch.setenv("MODELBAY_CONFIG", str(path))
        return path

    return write


def test_config_file_gives_default_arguments_and_an_argument_wins(config_file: Any, plugin: Any) -> None:
    path = config_file("[args]\nmax-model-len = 64\nseed = 7\n")
    resolution = resolve("m", plugins=plugin(native=YES), seed=1)
    assert (resolution.args.max_model_len, resolution.args.seed) == (64, 1)
    assert resolution.trace.find("argument max_model_len").source == f"[args] max_model_len in {path}"
    assert resolution.trace.find("argument seed") is None


def test_config_file_chooses_the_backend_of_an_architecture(config_file: Any, plugin: Any) -> None:
    path = config_file('[model_impl]\nFooForCausalLM = "late"\n')
    loaded = plugin(late=YES, first=YES)
    resolution = resolve("m", plugins=loaded)
    assert resolution.backend == "late"
    assert str(path) in resolution.trace.find("backend").source
    assert resolve("m", plugins=loaded, model_impl="first").backend == "first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[args]\nmax_model_length = 1", "unknown engine argument 'max_model_length'"),
        ("[args]\nmax_model_len = 0", "max_model_len must be a positive integer"),
        ('[args]\nseed = "x"', "seed .* must be int, got 'x'"),
        ("[args]\nenforce_eager = 1", "enforce_eager .* must be bool, got 1"),
        ('[args]\nmodel = "x"', "cannot hold model"),
        ("[arguments]\nx = 1", r"unknown section \[arguments\].*Known: prefer, args, model_impl"),
        ("[prefer]\nx = 1", r"\[prefer\] x .* must be a string"),
        ("prefer = 1", r"\[prefer\] .* must be a table"),
        ("[args", "cannot read the config file"),
    ],
)
def test_a_faulty_config_file_is_named_with_its_fault(config_file: Any, text: str, message: str) -> None:
    path = config_file(text)
    with pytest.raises(UsageError, match=message) as caught:
        resolve("m")
    assert str(path) in str(caught.value)


def test_the_config_file_is_found_in_the_users_configuration_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELBAY_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("APPDATA", str(tmp_path))
    assert load_settings().path is None
    path = tmp_path / "modelbay" / "config.toml"
    path.parent.mkdir()
    path.write_text("[args]\nseed = 3\n")
    settings = load_settings()
    assert (settings.path, settings.args) == (path, {"seed": 3})
    monkeypatch.setenv("MODELBAY_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(UsageError, match=r"MODELBAY_CONFIG names .*absent\.toml"):
        load_settings()


def test_backends_lists_what_is_installed_by_kind(model: Any, plugin: Any) -> None:
    kernels = [KernelSpec(set=name, op="rms_norm", target="a:b", devices=("cpu",)) for name in ("one", "two")]
    installed = backends(load_plugins(plugin(late=YES, first=NO, records=[("kernels", kernels)])))
    assert [owned.value.name for owned in installed.modeling] == ["first", "late"]
    assert {name: len(owned) for name, owned in installed.kernel_sets.items()} == {"one": 1, "two": 1}
    assert {"safetensors", "pt", "dummy"} <= {owned.value.name for owned in installed.load_formats}
