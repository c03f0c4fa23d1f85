"""Run folders: where a stage works, how it says how far it is, and how it proves that it is done.

    outputs/RUN/STAGE/{notebook.ipynb, notebook.html, parameters.yaml, metrics.json, progress.json, run.log, DONE.json}

`DONE.json` is written last and atomically; it carries the hash of the stage's config, of its inputs and of its
outputs. Nothing else makes a stage done: papermill leaves the cells of a killed notebook marked `completed`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from eagle3_utils.config import STAGES, StageConfig
from eagle3_utils.errors import UserError
from eagle3_utils.locks import RUNNER, TRAINING, in_brackets, lock_file

# Keys that say how a stage runs, not what it makes: changing them does not undo a finished stage.
_HOW_KEYS = {"run_dir", "data_root", "port", "startup_timeout_seconds", "server_python", "server_urls",
             "server_dump_dirs", "num_concurrent", "prefetch_batches"}  # fmt: skip
_IN_DATA_FOLDER = re.compile(
    r"corpus|hidden_states|draft(\.old(-\d+)?)?|dropped|responses\.jsonl?|self_made_prompts\.jsonl"
)
_VERSIONED = ("sglang", "torch", "transformers", "h5py", "numpy", "eagle3-utils")


def repo_root() -> Path:
    """The folder that holds `notebooks/` and `eagle3_utils/`, from the working directory upwards, else this file's."""
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / "notebooks").is_dir() and (folder / "eagle3_utils").is_dir():
            return folder
    return Path(__file__).resolve().parents[1]


def resolve_path(path: str | Path) -> Path:
    """An absolute path; a relative one counts from the repository root, so notebooks work from any folder."""
    return (repo_root() / Path(path).expanduser()).resolve()


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, as `write_text`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """fsync a file, or a folder so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """What a JSON file holds, or None when there is no such file."""
    return json.loads(path.read_text()) if path.is_file() else None


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill; it takes the place of `folder` only once the block has filled it."""
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def hash_files(paths: Iterable[Path]) -> str:
    """xxh3-128 of the files' names and contents, in the order of their names."""
    digest = xxhash.xxh3_128()
    for path in sorted(map(Path, paths), key=lambda path: path.name):
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """xxh3-128 of a JSON value in canonical form."""
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_done(run_folder: Path, stage: str) -> dict | None:
    """A finished stage's `DONE.json`, or None."""
    return read_json(run_folder / stage / "DONE.json")


def read_runner(run_folder: Path) -> tuple[int, str] | None:
    """The pid of a run folder's last `eagle3 run`, and the command that goes on with it; None if there was none."""
    path = run_folder / "runner.pid"
    pid, _, command = path.read_text().partition("\n") if path.is_file() else ("", "", "")
    return (int(pid), command.strip()) if pid else None


def is_run_folder(folder: Path) -> bool:
    """Whether a stage has begun there, or a runner."""
    return any((folder / name).exists() for name in ("runner.pid", "runner.log", *STAGES))


def require_run_folder(folder: Path) -> None:
    """Raise `UserError` unless it is a run folder."""
    if not is_run_folder(folder):
        raise UserError("is not a run folder: it holds no stage", str(folder), exit_code=2)


def recorded_data(run_folder: Path, done: dict | None) -> Path:
    """Where the data of a run lie, by a stage's `DONE.json`; in a copied or moved run folder, its own data.

    The path in `DONE.json` is absolute: it counts where it lies in this run folder, or is there and lies in no other
    run's folder (a `data_root` elsewhere).
    """
    data, run_folder = Path(done["data"]) if done else None, run_folder.resolve()
    if data is None or data.is_relative_to(run_folder):
        return data or run_folder / "data"
    elsewhere = data.is_dir() and not any(map(is_run_folder, (data, *data.parents)))
    return data if elsewhere else run_folder / "data"


def clean_targets(run_folder: Path, states_only: bool) -> list[tuple[Path, int]]:
    """What `eagle3 clean` would remove of a run, each with its bytes.

    Of a data folder elsewhere only what a run puts there: the rest of that disk is its owner's. Raises `UserError`
    for a folder that is no run's, and for one in which a runner or a training is at work.
    """
    require_run_folder(run_folder)
    data = recorded_data(run_folder, next(filter(None, (read_done(run_folder, stage) for stage in STAGES)), None))
    for lock, what, how in (
        (run_folder / RUNNER, "a runner", f"eagle3 stop {run_folder}"),
        (data / "draft" / TRAINING, "a training", "wait for its end, or stop it"),
    ):
        with lock_file(lock) if lock.is_file() else nullcontext() as holder:
            if holder is not None:
                raise UserError(f"{what}{in_brackets(holder)} is at work here", str(lock.parent), how)
    targets = [data / "hidden_states"]
    if not states_only:
        elsewhere = [] if data.is_relative_to(run_folder) else sorted(data.iterdir())
        elsewhere = [path for path in elsewhere if _IN_DATA_FOLDER.fullmatch(path.name)]
        targets = [*elsewhere, run_folder]
    return [(path, _num_bytes(path)) for path in targets if path.exists()]


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def remove(path: Path) -> None:
    """Remove a folder or a file of a run."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def config_values(config: StageConfig) -> dict[str, Any]:
    """The parameters that decide what a stage makes."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in _HOW_KEYS}


def data_folder(config: StageConfig) -> Path:
    """Where corpus, hidden states and draft of a run live."""
    return resolve_path(config.data_root) if config.data_root else resolve_path(config.run_dir) / "data"


def output_of(config: StageConfig, stage: str, name: str) -> str:
    """The content hash of what an earlier stage of the same run made.

    Raises `UserError` when that stage is not done.
    """
    done = read_done(resolve_path(config.run_dir), stage)
    if done is None:
        raise UserError(
            f"{config.stage} needs {stage}, which is not done", config.run_dir, f"run it first: notebooks/{stage}.ipynb"
        )
    return done["outputs"][name]


def why_not_current(done: dict, config: StageConfig, inputs: dict[str, str]) -> str | None:
    """Why a finished stage does not stand for this config and these inputs; None when it does.

    An input that its `DONE.json` does not name counts for nothing: an earlier version did not record it.
    """
    wanted, had = config_values(config), done["config"]
    for key in sorted(wanted.keys() | had.keys()):
        if wanted.get(key) != had.get(key):
            return f"parameter {key} is now {wanted.get(key)!r}, it was made with {had.get(key)!r}"
    for name in sorted(done["inputs"]):
        if inputs.get(name) != done["inputs"].get(name):
            return f"input {name} is now {inputs.get(name)}, it was made with {done['inputs'].get(name)}"
    return None


class Stage:
    """A stage at work: its folders, its log, its progress, its end. Made by `open_stage`."""

    def __init__(self, config: StageConfig, inputs: dict[str, str]):
        self.config, self.inputs = config, inputs
        self.run_folder = resolve_path(config.run_dir)
        self.folder = self.run_folder / config.stage
        self.data = data_folder(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data.mkdir(parents=True, exist_ok=True)
        self.log = _stage_logger(config.stage, self.folder / "run.log")
        self._started, self._last_progress = time.time(), 0.0
        self.progress(state="running", force=True)

    def progress(self, *, force: bool = False, min_interval_seconds: float = 2.0, **fields: Any) -> None:
        """Write `progress.json` (at most every `min_interval_seconds`, unless forced).

        Usual fields: state, done, total, unit, rate, eta_seconds; anything JSON may be added.
        """
        now = time.time()
        if not force and now - self._last_progress < min_interval_seconds:
            return
        self._last_progress = now
        base = {"stage": self.config.stage, "pid": os.getpid(), "started": self._started, "updated": now}
        write_json(self.folder / "progress.json", base | {"state": "running"} | fields)

    def finish(self, metrics: dict[str, Any], outputs: dict[str, str]) -> None:
        """Write `metrics.json`, then `DONE.json`: only after this the stage counts.

        Parameters
        ----------
        metrics : the figures of the stage, JSON values.
        outputs : name → content hash of everything later stages read.
        """
        write_json(self.folder / "metrics.json", metrics)
        self.progress(state="done", force=True)
        done = {
            "stage": self.config.stage,
            "config": config_values(self.config),
            "config_hash": hash_json(config_values(self.config)),
            "inputs": self.inputs,
            "outputs": outputs,
            "data": str(self.data),
            "versions": {name: metadata.version(name) for name in _VERSIONED} | {"python": sys.version.split()[0]},
            "started": self._started,
            "wall_seconds": round(time.time() - self._started, 1),
        }
        write_json(self.folder / "DONE.json", done)
        self.log.info("done in %.0f s", done["wall_seconds"])


def open_stage(config: StageConfig, inputs: dict[str, str]) -> Stage:
    """Begin (or resume) a stage: makes its folder, and removes `DONE.json` and the figures of an earlier time.

    Parameters
    ----------
    config : the stage's validated parameters.
    inputs : name → content hash of what it reads, from `lineage.stage_inputs`.
    """
    opened = Stage(config, inputs)
    for name in ("DONE.json", "metrics.json"):
        (opened.folder / name).unlink(missing_ok=True)
    return opened


def _stage_logger(stage: str, path: Path) -> logging.Logger:
    logger = logging.getLogger(f"eagle3.{stage}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    for handler in (logging.FileHandler(path), logging.StreamHandler(sys.stdout)):
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    return logger
