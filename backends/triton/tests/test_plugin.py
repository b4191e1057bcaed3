"""What the plugin registers, and when it is chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from modelbay.errors import UsageError
from modelbay.plugins import load_plugins
from modelbay_runtime.kernels.table import KernelTable
from modelbay_triton import activation, attention, availability, constraints, norm

interpreted_only = pytest.mark.skipif(
    torch.cuda.is_available() and not availability.interpreter_requested(), reason="here kernels are compiled"
)
HEADS = {"layer": 0, "num_heads": 8, "num_kv_heads": 2, "head_size": 64, "v_head_size": 64, "window": None}


def table(device="cpu", dtype=torch.float32, **forced):
    return KernelTable(load_plugins(["triton", "runtime"]), torch.device(device), dtype, **forced)


def test_plugin_imports_neither_torch_nor_triton():
    code = (
        "import sys, modelbay_triton.plugin as p; p.register_kernels(); print({'torch', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@interpreted_only
def test_interpreted_kernels_are_never_chosen_unless_asked_for():
    assert table().bind("rms_norm", {"size": 64}).__module__ == "modelbay_runtime.kernels.cpu"
    assert table(kernels="triton").bind("rms_norm", {"size": 64}) is norm.rms_norm
    assert table(attention="triton").bind("attention.full", HEADS) is attention.attention


def test_compiled_kernels_go_first_on_cuda(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for op, facts in (("rms_norm", {"size": 64}), ("attention.sliding", {**HEADS, "window": 8})):
        assert table("cuda", torch.bfloat16).bind(op, facts).__module__.startswith("modelbay_triton.")
    assert table("cuda", kernels="torch").bind("rms_norm", {"size": 64}).__module__ == "modelbay_runtime.kernels.ops"


def test_cpu_without_the_interpreter_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert table().bind("rms_norm", {"size": 64}).__module__ == "modelbay_runtime.kernels.cpu"
    with pytest.raises(UsageError, match="kernel set 'triton' cannot serve rms_norm"):
        table(kernels="triton").bind("rms_norm", {"size": 64})
    assert "TRITON_INTERPRET=1" in availability.interpreted()
    assert availability.compiled() is None


def test_a_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert availability.compiled() == availability.interpreted() == "the package triton is not installed"


@pytest.mark.parametrize("value", ["0", "", "false", "off"])
def test_interpreter_switched_off(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert not availability.interpreter_requested()


def test_variable_set_too_late_is_a_reason():
    code = (
        "import os, triton; os.environ['TRITON_INTERPRET'] = '1'; "
        "from modelbay_triton import availability; print(availability.interpreted())"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "set it before Python starts" in done.stdout


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"head_size": 512}, "head_size is 512, at most 256 fits"),
        ({"v_head_size": 320}, "v_head_size is 320, at most 256 fits"),
        ({"num_heads": 512}, "256 query heads share a kv head, at most 128 fit"),
        ({"alibi": True, "bias": None}, "knows nothing of alibi"),
    ],
)
def test_attention_it_cannot_serve(facts, reason):
    assert constraints.attention({**HEADS, **facts}) == reason


@pytest.mark.parametrize("facts", [{}, {"window": 8, "sinks": True, "softcap": 30.0}, {"head_size": 80}])
def test_attention_it_can_serve(facts):
    assert constraints.attention({**HEADS, "device": "cuda", "dtype": "bfloat16", **facts}) is None


def test_other_constraints():
    assert constraints.rms_norm({"size": 8192}) is None
    assert "at most 32768" in constraints.rms_norm({"size": 40000})
    assert constraints.act_and_mul({"activation": "silu"}) is None
    assert "'mish' is not among" in constraints.act_and_mul({"activation": "mish"})


def test_every_activation_of_the_reference_is_known():
    from modelbay_runtime.kernels.ops import ACTIVATIONS

    assert set(activation.ACTIVATIONS) == set(ACTIVATIONS)
