"""What rank 0 tells the others to do, in order, while they may still be at work on what it said before."""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: The first message has this size and says how long the whole is; most commands fit into it.
_FIRST_BYTES = 8192
_HEADER_BYTES = 8

#: How often rank 0 says that it is still there, as a share of the time after which the others give it up.
_BEATS = 4


class Teller:
    """Rank 0's end.

    Args:
        group: a process group of all ranks that nothing else uses.
        timeout: seconds after which a rank that hears nothing gives up.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self._group = group
        # Reentrant: the garbage collector may end a model in the very thread that says something for it. What it says
        # then goes out after what it interrupted.
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._telling = False
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, args=(timeout / _BEATS,), daemon=True)
        self._beating.start()

    def tell(self, command: Any) -> None:
        """Send to every rank; returns when it is on its way to all.

        Raises:
            RuntimeError: a rank is gone.
        """
        payload = pickle.dumps(command)
        message = len(payload).to_bytes(_HEADER_BYTES, "little") + payload
        with self._lock:
            self._waiting.append(message)
            if self._telling:
                return
            self._telling = True
            try:
                while self._waiting:
                    self._send(self._waiting.popleft())
            finally:
                self._telling = False
                self._waiting.clear()

    def _send(self, message: bytes) -> None:
        first = message[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")
        self._broadcast(torch.frombuffer(bytearray(first), dtype=torch.uint8))
        if len(message) > _FIRST_BYTES:
            self._broadcast(torch.frombuffer(bytearray(message[_FIRST_BYTES:]), dtype=torch.uint8))

    def close(self) -> None:
        """Say nothing any more."""
        self._ended.set()
        if threading.current_thread() is not self._beating:
            self._beating.join(timeout=1)

    def _broadcast(self, data: torch.Tensor) -> None:
        self._group.broadcast([data]).wait()

    def _beat(self, every: float) -> None:
        while not self._ended.wait(every):
            try:
                self.tell(None)
            except RuntimeError:
                return  # whoever computes will notice


class Listener:
    """The other ranks' end: a thread takes commands in, so that rank 0 never waits for a rank that computes.

    Args:
        lost: is called, in that thread, when rank 0 is gone or silent for too long.
    """

    def __init__(self, group: Any, lost: Callable[[BaseException], None]) -> None:
        self._group = group
        self._lost = lost
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def commands(self) -> Iterator[Any]:
        """Commands as they come; the last one ends it, see `Listener.is_last`.

        Raises:
            Exception: a command that cannot be read here.
        """
        while True:
            command = self._commands.get()
            if isinstance(command, Exception):
                raise command
            yield command
            if self.is_last(command):
                return

    @staticmethod
    def is_last(command: Any) -> bool:
        return command == ("close",)

    def _listen(self) -> None:
        try:
            while True:
                command = self._receive()
                if command is not None:
                    self._commands.put(command)
                if self.is_last(command):
                    return
        except RuntimeError as error:  # c10d's
            self._lost(error)
        except Exception as error:
            self._commands.put(error)

    def _receive(self) -> Any:
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._group.broadcast([first]).wait()
        head = first.numpy().tobytes()
        size = int.from_bytes(head[:_HEADER_BYTES], "little") + _HEADER_BYTES
        if size > _FIRST_BYTES:
            rest = torch.empty(size - _FIRST_BYTES, dtype=torch.uint8)
            self._group.broadcast([rest]).wait()
            head += rest.numpy().tobytes()
        return pickle.loads(head[_HEADER_BYTES:size])
