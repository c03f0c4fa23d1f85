from types import SimpleNamespace

from eagle3_utils.states.extraction import progress
from eagle3_utils.states.extraction.progress import MAX_POINTS, ExtractionProgress, progress_line

FIGURES = {
    "seconds": 3.0,
    "done": 1200,
    "total": 5000,
    "failed": 1,
    "retries": 2,
    "in_flight": 9,
    "tokens_per_second": 980.0,
    "tokens_per_second_now": 1010.0,
    "bytes_per_second": 4.5e6,
    "eta_seconds": 150.0,
    "staged_bytes": 3 << 20,
    "staging_max_bytes": 4 << 30,
    "disk_free_bytes": 70 << 30,
    "servers_alive": 1,
}


def test_the_line_says_samples_rates_eta_staging_disk_and_failures():
    assert progress_line("train", FIGURES) == (
        "train: 1,200/5,000 samples · 1,010 tokens/s now, 980 mean · 0.004 GB/s · ETA 2.5 min · "
        "staged 3 MiB of 4 GiB · 70 GiB free · 1 failed, 2 retried"
    )
    assert "ETA unknown" in progress_line("train", FIGURES | {"eta_seconds": None})


def test_progress_reaches_the_stage_and_the_history_stays_small():
    written = []
    watcher = ExtractionProgress(SimpleNamespace(progress=lambda **fields: written.append(fields)), "val")
    for second in range(3 * MAX_POINTS):
        watcher(FIGURES | {"seconds": float(second)})
    assert written[-1]["part"] == "val" and written[-1]["done"] == 1200 and written[-1]["rate"] == 1010.0
    assert MAX_POINTS / 2 <= len(watcher.history) <= MAX_POINTS
    gaps = {round(b[0] - a[0]) for a, b in zip(watcher.history, watcher.history[1:], strict=False)}
    assert gaps <= {2, 4}


def test_the_notebook_has_one_line_that_is_replaced(monkeypatch):
    shown, replaced = [], []
    handle = SimpleNamespace(update=lambda data, raw: replaced.append(data["text/plain"]))
    monkeypatch.setattr(progress, "get_ipython", lambda: "a notebook")
    monkeypatch.setattr(progress, "display", lambda data, raw, display_id: shown.append(data["text/plain"]) or handle)
    watcher = ExtractionProgress(SimpleNamespace(progress=lambda **fields: None), "val")
    for done in (1, 2, 3):
        watcher(FIGURES | {"done": done})
    assert [line[:7] for line in shown] == ["val: 1/"] and [line[:7] for line in replaced] == ["val: 2/", "val: 3/"]
