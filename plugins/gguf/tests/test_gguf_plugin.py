"""What the plugin registers, and that it costs nothing to register it."""

from __future__ import annotations

import subprocess
import sys

from modelbay.plugins import load_plugins
from modelbay.specs import load_target
from modelbay_gguf import plugin


def test_registers_a_format_that_carries_config_and_tokenizer() -> None:
    plugins = load_plugins([plugin])
    spec = plugins.get("load_formats", "gguf").value
    assert spec.suffixes == (".gguf",)
    mode = plugins.get("tokenizer_modes", spec.tokenizer_mode).value
    for target in (spec.target, spec.config, spec.transforms, mode.target):
        assert callable(load_target(target))


def test_c11_the_quant_method_of_its_configs_is_offered() -> None:
    assert load_plugins([plugin]).get("quantizations", "gguf") is not None


def test_registering_imports_nothing_heavy() -> None:
    code = (
        "import sys; from modelbay.plugins import load_plugins; load_plugins(['gguf']).get('load_formats', 'gguf');"
        "print([name for name in ('torch', 'transformers', 'gguf', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
