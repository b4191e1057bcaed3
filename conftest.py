"""What every test of every member gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

# The kit's checks are asserts outside of test files: without this a failure would not say what differed.
pytest.register_assert_rewrite("modelbay_testing")

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def trust_lock_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Code that fixtures trust is not recorded among what the user trusts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELBAY_TRUST_LOCK", str(tmp_path_factory.mktemp("trust") / "trust.lock"))
        yield


@pytest.fixture(autouse=True)
def trust_lock(
    trust_lock_of_the_session: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each test starts without anything trusted."""
    path = tmp_path_factory.getbasetemp() / f"trust-{next(_numbers)}" / "trust.lock"
    monkeypatch.setenv("MODELBAY_TRUST_LOCK", str(path))
