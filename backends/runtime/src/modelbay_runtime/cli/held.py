"""What libraries say while a model is looked at: after it was, or not at all where that fails.

Their warnings are about what then makes it fail, and an error is one line.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class _Hold(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if not any(record is held for held in self.records):  # each handler has its say
            self.records.append(record)
        return False


@contextmanager
def held_warnings() -> Iterator[None]:
    """Keep back warnings of Python and of Transformers' logger, and let them out if the block succeeds."""
    hold, handlers = _Hold(), _handlers()
    with warnings.catch_warnings(record=True) as caught:
        for handler in handlers:
            handler.addFilter(hold)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(hold)
    for record in hold.records:
        logging.getLogger(record.name).handle(record)
    for warning in caught:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


def _handlers() -> list[logging.Handler]:
    """Those of Transformers' own logger, which does not pass records on."""
    try:
        from transformers.utils import logging as library
    except ImportError:
        return []
    library.get_logger()  # makes them
    return list(logging.getLogger("transformers").handlers)
