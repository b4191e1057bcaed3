"""Back-pressure: more requests than the server was told to take are asked to come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modelbay_server.errors import ApiError


class Limiter:
    """Counts HTTP requests that run or wait in the engines. Only the event loop may touch it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_flight = 0
        self.refused = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Held while a request is in the engines.

        Raises:
            ApiError: 429 with Retry-After, when all are taken.
        """
        if self.in_flight >= self.most:
            self.refused += 1
            raise ApiError(
                429,
                f"the server runs as many requests as it takes ({self.most}).",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
