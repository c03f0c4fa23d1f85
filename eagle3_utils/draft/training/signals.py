"""SIGTERM and SIGINT as a wish to stop at the next safe place, instead of an end in the middle of a step."""

from __future__ import annotations

import signal
import threading
import time

_SAME_WISH_SECONDS = 2.0


class StopRequest:
    """While the `with` block runs, a first signal sets `requested`; one more than two seconds later interrupts at once.

    Sooner ones are the same wish: an interrupted notebook tells torchrun itself and by its process group, and torchrun
    hands both on to its ranks.

    Outside the main thread signals cannot be caught; there `requested` stays False.
    """

    def __init__(self):
        self.requested, self._since = False, 0.0
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
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > _SAME_WISH_SECONDS:
            raise KeyboardInterrupt
