"""Training as the notebook starts it, in this process and as a torchrun; both leave the same best draft."""

import pytest
import torch

from eagle3_utils.draft.training import launch
from eagle3_utils.draft.training.build import draft_of_training
from eagle3_utils.errors import UserError
from eagle3_utils.runs import data_folder, open_stage

pytest_plugins = ["draft_runs"]  # fixtures


def test_best_draft_of_a_finished_training_is_the_one_returned(make_config):
    config = make_config(epochs=2.0)
    model, report = launch.run_training(config, open_stage(config, inputs={}))
    again = draft_of_training(config, data_folder(config))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert report.best_step > 0 and report.tokens == 2 * 8 * 32
    progress = (open_stage(config, inputs={}).folder / "run.log").read_text()
    assert "validation: accuracy by step" in progress


def test_failing_rank_is_an_error_that_names_its_log(make_config):
    config = make_config(num_gpus=2, batches_per_step=3)  # no multiple of two ranks
    stage = open_stage(config, inputs={})
    with pytest.raises(UserError, match=r"exit code") as raised:
        launch.run_training(config, stage)
    assert "train.log" in str(raised.value)
    assert "no multiple of 2 ranks" in (stage.folder / "train.log").read_text()
