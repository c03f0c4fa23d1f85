"""A run's draft, handed out: `eagle3 export RUN --out DIR`, and the card beside the weights of the run itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from eagle3_utils import runs
from eagle3_utils.draft.card import CARD_NAME, write_card
from eagle3_utils.errors import UserError

TRAINING = "04_train_draft"
_FILES = ("config.json", "model.safetensors")


def draft_folder(run_folder: Path) -> Path | None:
    """Where a run's exported draft lies; None when the training is not done, or the draft was removed since."""
    done = runs.read_done(run_folder, TRAINING)
    folder = runs.recorded_data(run_folder, done) / "draft" / "export" if done else None
    return folder if folder and all((folder / name).is_file() for name in _FILES) else None


def export_run(run_folder: Path, out: Path) -> Path:
    """Copy the best draft of a run with its card; an older draft of the same name is replaced in one step.

    Raises `UserError` when there is no draft, it is not the one that training made, or `out` holds something else.
    """
    source, out = draft_folder(run_folder), Path(out).resolve()
    if source is None:
        raise UserError(f"{TRAINING} is not done, so there is no draft", str(run_folder))
    made = runs.read_done(run_folder, TRAINING)["outputs"]["draft"]
    if runs.hash_files([source / name for name in _FILES]) != made:
        raise UserError("the draft is not the one that training made", str(source), "train again: --from 04 --force")
    foreign = {path.name for path in out.iterdir()} - {*_FILES, CARD_NAME} if out.is_dir() else set()
    if out.is_file() or foreign:
        raise UserError("is there already and is no draft of ours", str(out), "name a new folder", exit_code=2)
    with runs.replaced_folder(out) as new:
        for name in _FILES:
            shutil.copy2(source / name, new / name)
        write_card(new, run_folder)
    return out
