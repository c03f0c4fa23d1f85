"""How far an extraction is: `progress.json` for other terminals, and one line in the notebook, always replaced."""

from __future__ import annotations

from IPython import get_ipython
from IPython.display import display

from eagle3_utils.runs import Stage
from eagle3_utils.states.sizes import format_bytes

MAX_POINTS = 2000  # of the history; when full, every other one is dropped


class ExtractionProgress:
    """The `progress` callback of `extract` for a stage; `history` keeps (seconds, tokens/s) for a figure."""

    def __init__(self, stage: Stage, name: str):
        self.stage, self.name = stage, name
        self.history: list[tuple[float, float]] = []
        self._every, self._calls = 1, 0
        self._display = None

    def __call__(self, figures: dict) -> None:
        self.stage.progress(unit="samples", part=self.name, rate=figures["tokens_per_second_now"], **figures)
        self._remember(figures)
        line = {"text/plain": progress_line(self.name, figures)}
        if self._display is not None:
            self._display.update(line, raw=True)
        elif get_ipython() is not None:
            self._display = display(line, raw=True, display_id=True)

    def _remember(self, figures: dict) -> None:
        if self._calls % self._every == 0:
            self.history.append((figures["seconds"], figures["tokens_per_second_now"]))
        self._calls += 1
        if len(self.history) > MAX_POINTS:
            self.history, self._every = self.history[::2], self._every * 2


def progress_line(name: str, figures: dict) -> str:
    """One line for people: samples, rates, ETA, staging, disk, failures."""
    eta = figures["eta_seconds"]
    return (
        f"{name}: {figures['done']:,}/{figures['total']:,} samples · "
        f"{figures['tokens_per_second_now']:,.0f} tokens/s now, {figures['tokens_per_second']:,.0f} mean · "
        f"{figures['bytes_per_second'] / 1e9:.3f} GB/s · ETA {'unknown' if eta is None else f'{eta / 60:.1f} min'} · "
        f"staged {format_bytes(figures['staged_bytes'])} of {format_bytes(figures['staging_max_bytes'])} · "
        f"{format_bytes(figures['disk_free_bytes'])} free · "
        f"{figures['failed']} failed, {figures['retries']} retried"
    )
