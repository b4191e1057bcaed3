"""A repository's own code in every process of a mesh: one content, one class, no race on the empty cache (CASES 10)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, SamplingParams

_OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "distributed_timeout_seconds": 60,
    "trust_remote_code": True,
}  # fmt: skip


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_case_10_a_custom_model_on_all_ranks(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int],
) -> None:
    """The ranks find no copy of the code, and make one at the same time."""
    monkeypatch.setenv("MODELBAY_CACHE", str(tmp_path))
    ids = [5, 6, 7, 8, 9, 10, 11]
    expected = reference("lumen").greedy(ids, 8)
    with LLM(str(checkpoint("lumen")), **_OPTIONS, **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        modules = llm.apply_model(lambda module: type(module.base).__module__)
    assert list(output.outputs[0].token_ids) == expected
    assert modules == [modules[0]] * 2
