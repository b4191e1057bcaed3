"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string, and holds back text that may turn out to be the beginning of one.

    What is found does not depend on how the text was cut into pieces: the stop string whose end comes first wins, and
    of those that end together the longest. A piece costs its own length and that of the stop strings.

    Args:
        stops: the stop strings, none empty.
        include: whether the stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add a piece of text.

        Args:
            piece: the new text.
            armed: whether a stop string that ends in this piece counts.

        Returns:
            The text that may now be shown, and the stop string that was found, if one was: nothing comes after it.
        """
        text = self._held + piece
        found = self._find(text, len(self._held)) if armed else None
        if found is not None:
            end, start, stop = found
            self._held = ""
            return text[: end if self._include else start], stop
        cut = len(text) - self._possible_beginning(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, seen: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the first stop string that ends after the first ``seen`` characters."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found, default=None)

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
