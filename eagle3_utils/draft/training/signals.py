"""SIGTERM and SIGINT as a wish to stop at the next safe place, instead of an end in the middle of a step."""

from __future__ import annotations

import signal
import threading


class StopRequest:
    """While the `with` block runs, a first signal sets `requested`; a second one interrupts at once.

    Outside the main thread signals cannot be caught; there `requested` stays False.
    """

    def __init__(self):
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, _number, _frame) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
