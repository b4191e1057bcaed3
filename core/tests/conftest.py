"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modelbay_testing.hub import LocalHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub on this machine and an empty cache, as the environment names them. It knows the token ``hf_good``."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELBAY_CACHE", str(tmp_path / "modelbay-cache"))
    with LocalHub(tokens=("hf_good",)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
