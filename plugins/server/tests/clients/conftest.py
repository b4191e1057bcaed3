"""SmolLM2 and all-MiniLM served by `modelbay serve` in a process of its own, for clients that exist."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM
from modelbay_testing.assets import minilm_dir, or_skip, smollm2_dir
from modelbay_testing.serve_process import ServeProcess, serve_process

ENGINE = {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "kv_cache_memory_bytes": 2**28}
#: SmolLM2's own, with tools in the way of Hermes.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\nYou may call functions. Signatures, in <tools></tools>:\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools>\nReturn {"name": <name>, "arguments": <arguments>} in <tool_call></tool_call>.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in float32, with a template that knows tools."""
    path = tmp_path_factory.mktemp("smollm2") / "model"
    path.mkdir()
    for file in or_skip(smollm2_dir, "float32").iterdir():
        if file.suffix == ".safetensors":
            (path / file.name).symlink_to(file)
        else:
            shutil.copyfile(file, path / file.name)
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[ServeProcess]:
    """Under the names "smollm2" and "minilm"."""
    argv = [str(smollm2), "--model", str(or_skip(minilm_dir)), "--served-model-name", "smollm2",
            "--served-model-name", "minilm", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(2**28),
            "--no-enable-prefix-caching"]  # fmt: skip
    with serve_process(*argv) as server:
        server.wait_until_ready()
        yield server
        assert server.process.poll() is None, server.lines
        assert not [line for line in server.lines if "Traceback" in line], server.lines


@pytest.fixture(scope="module")
def base_url(served: ServeProcess) -> str:
    return served.url + "/v1"


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Iterator[Any]:
    """The same model without a server: what answers are compared with."""
    with LLM(str(smollm2), **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="session")
def weather() -> dict[str, Any]:
    """A tool."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    said = "The weather in a city"
    return {"type": "function", "function": {"name": "get_weather", "description": said, "parameters": parameters}}
