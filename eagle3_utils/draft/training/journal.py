"""What a training run leaves to read: metrics.jsonl (append only), TensorBoard, and Weights & Biases if its key is set.

A resumed run writes some steps again; `read_journal` leaves out what it had written of them before.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import xxhash


class Journal:
    """Appends entries {"kind", "step", …}; closed by `close` or the end of a `with` block."""

    def __init__(self, folder: Path, run_name: str):
        from torch.utils.tensorboard import FileWriter

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        torn = _ends_within_a_line(path)
        self._file = open(path, "a")  # noqa: SIM115 (closed in close)
        self._file.write("\n" if torn else "")
        self._board = FileWriter(str(folder / "tensorboard"))
        self._wandb = None
        if os.environ.get("WANDB_API_KEY"):
            self._wandb = _open_wandb(folder, run_name)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One entry; numbers and lists of numbers (by step of the unroll) become curves."""
        entry = {"kind": kind, "step": step} | {name: without_nan(value) for name, value in values.items()}
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()
        curves = {f"{kind}/{name}": value for name, value in _numbers(values).items()}
        self._board.add_summary(_one_summary(curves), step)
        if self._wandb is not None:
            self._send(kind, step, curves)

    def _send(self, kind: str, step: int, curves: dict[str, float]) -> None:
        """To Weights & Biases, whose own step only goes up: the optimiser's, which a resumed run repeats and the best
        one goes back to, is a figure like the others."""
        if kind == "best":
            self._wandb.summary.update({"best/step": step, **curves})
        else:
            self._wandb.log({"optimiser_step": step, **curves})

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether a kill cut the last line of a file short."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _one_summary(curves: dict[str, float]) -> Any:
    """All scalars as one TensorBoard event: a tenth of the time of one event each, in every step."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in curves.items()])


def _open_wandb(folder: Path, run_name: str) -> Any:
    """The Weights & Biases run of this folder, gone on with when it is there; None, and a word, without the library."""
    if importlib.util.find_spec("wandb") is None:
        logging.getLogger("eagle3.train").warning("WANDB_API_KEY is set, but wandb is not installed")
        return None
    import wandb

    run_id = f"{run_name}-{xxhash.xxh3_64_hexdigest(str(folder.resolve()).encode())[:8]}"
    run = wandb.init(project="eagle3", name=run_name, id=run_id, resume="allow")
    run.define_metric("optimiser_step")
    for kind in ("train", "validation"):
        run.define_metric(f"{kind}/*", step_metric="optimiser_step")
    return run


def read_journal(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Entries of one kind ("train", "validation" or "best") by step; null comes back as NaN.

    A training step that was taken again, after a kill, undoes what was written of it and of later ones: curves are of
    one training. A line cut short is passed over.
    """
    entries: dict[str, list[dict[str, Any]]] = {}
    path = Path(folder) / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        entries.setdefault(entry["kind"], [])
        for other, written in entries.items():
            while entry["kind"] in ("train", other) and written and written[-1]["step"] >= entry["step"]:
                written.pop()
        entries[entry["kind"]].append(entry)
    return [{name: _with_nan(value) for name, value in entry.items()} for entry in entries.get(kind, [])]


def without_nan(value: Any) -> Any:
    """A number, or a list of them, with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = value
        elif isinstance(value, list) and all(isinstance(item, int | float) for item in value):
            flat |= {f"{name}/{index}": item for index, item in enumerate(value)}
    return flat
