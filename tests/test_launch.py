"""Training as the notebook starts it, in this process and as a torchrun; both leave the same best draft."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from eagle3_utils.draft.train import TrainReport
from eagle3_utils.draft.training import launch
from eagle3_utils.draft.training.build import draft_of_training
from eagle3_utils.draft.training.journal import Journal, read_journal
from eagle3_utils.errors import UserError
from eagle3_utils.runs import data_folder, open_stage

pytest_plugins = ["draft_runs"]  # fixtures


def test_best_draft_of_a_finished_training_is_the_one_returned(make_config):
    config = make_config(epochs=2.0)
    model, report = launch.run_training(config, open_stage(config, inputs={}))
    again = draft_of_training(config, data_folder(config))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert report.best_step > 0 and report.tokens == 2 * 8 * 32
    assert read_journal(data_folder(config) / "draft", "train")[-1]["total_steps"] == report.steps
    progress = (open_stage(config, inputs={}).folder / "run.log").read_text()
    assert "validation: accuracy by step" in progress


@pytest.mark.parametrize(("share", "said"), [(0.1, True), (0.01, False)])
def test_waiting_for_data_is_said_when_it_is_much(share, said, caplog):
    launch._say_waiting(TrainReport(4, 256, 10.0, 25.6, share, 4, {}), SimpleNamespace(log=logging.getLogger()))
    assert ("10 % of the time went into waiting for data" in caplog.text) == said


def test_a_failing_rank_is_an_error_in_its_own_words(make_config):
    config = make_config(num_gpus=2, batches_per_step=2, max_tokens_per_step=16)  # samples are longer
    stage = open_stage(config, inputs={})
    with pytest.raises(UserError, match=r"train\.log: .*has 32 tokens, a batch at most 16"):
        launch.run_training(config, stage)


def test_progress_of_a_torchrun_says_how_far_it_is_at_which_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_POLL_SECONDS", 0.02)
    shown, figures = [], {"loss": 1.5, "tokens_per_second": 900.0, "total_steps": 40, "eta_seconds": 60}
    with Journal(tmp_path / "draft", "run") as entries:
        for step in (7, 8, 9, 8):  # the last one after a kill
            entries.write("train", step, **figures)
    stage = SimpleNamespace(folder=tmp_path, data=tmp_path, progress=lambda **fields: shown.append(fields))
    launch._watch([sys.executable, "-c", "import time; time.sleep(0.2)"], stage, lambda: None)
    with pytest.raises(ZeroDivisionError):  # a live plot that fails ends the training now, not days later
        launch._watch([sys.executable, "-c", "import time; time.sleep(60)"], stage, lambda: 1 / 0)
    assert shown[0] == {
        "done": 8, "total": 40, "unit": "steps", "rate": 900.0, "rate_unit": "tokens/s", "eta_seconds": 60, "loss": 1.5,
    }  # fmt: skip


def test_the_exception_of_a_rank_is_found_in_its_log():
    log = (
        "W1130 torchrun\n[rank1]: Traceback (most recent call last):\n[rank1]: TypeError: no Short\n[rank0]: OSError: x"
    )
    assert launch._first_error(log) == "TypeError: no Short"
    assert launch._first_error("nothing of use\n") is None
    log = "W1130\neagle3: draft: too few samples\n  lower batches_per_step\neagle3: draft: too few samples\n"
    assert launch._first_error(log) == "draft: too few samples\n  lower batches_per_step"
