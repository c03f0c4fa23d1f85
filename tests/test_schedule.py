"""Steps over a dataset: counts, short last steps, fractions of an epoch, waiting, and going on from any position."""

import time
from pathlib import Path

import pytest

from eagle3_utils.draft.training.checkpoint import Position
from eagle3_utils.draft.training.schedule import StepSchedule
from eagle3_utils.errors import UserError


class Dataset:
    """Epochs of seven named batches."""

    def num_batches(self, epoch):
        return 7

    def epoch(self, epoch, start=0):
        yield from [f"{epoch}.{number}" for number in range(7)][start:]


def walk(schedule, position):
    taken = []
    for batches, waited in schedule.steps(position, schedule.total_steps()):
        assert waited >= 0
        taken.append(batches)
        position.step += 1
        position.step_in_epoch += 1
    return taken


def test_every_batch_once_an_epoch_and_the_last_step_may_be_short():
    taken = walk(StepSchedule(Dataset(), 3, 2.0), Position())
    assert [len(step) for step in taken] == [3, 3, 1, 3, 3, 1]
    assert [batch for step in taken for batch in step] == [
        f"{epoch}.{number}" for epoch in (0, 1) for number in range(7)
    ]


def test_fraction_of_an_epoch_is_rounded_to_steps():
    assert StepSchedule(Dataset(), 1, 1.5).total_steps() == 7 + 4
    assert StepSchedule(Dataset(), 3, 0.1).total_steps() == 1


def test_too_few_samples_for_a_step_are_an_error_that_names_the_split_and_the_parameter():
    class Reader(list):
        folders = (Path("states/train"),)

    class TooFew(Dataset):
        reader, multiple_of = Reader("abcde"), 8

        def num_batches(self, epoch):
            if epoch < 1:
                return 7
            raise UserError("too few samples for 8 batches")

    assert StepSchedule(TooFew(), 1, 1.0).total_steps() == 7  # no epoch is planned that is not trained on
    with pytest.raises(UserError, match=r"train split has 5 samples: too few for steps of batches_per_step = 8") as e:
        StepSchedule(TooFew(), 1, 1.5).total_steps()
    assert "num_gpus" in e.value.fix and e.value.where == "states/train"


def test_going_on_from_the_middle_gives_the_rest():
    schedule = StepSchedule(Dataset(), 2, 2.0)
    whole = walk(schedule, Position())
    for done in range(len(whole) + 1):
        epoch, step_in_epoch = divmod(done, 4)
        position = Position(step=done, epoch=epoch, step_in_epoch=step_in_epoch)
        assert walk(schedule, position) == whole[done:]


def test_the_wait_for_all_batches_of_a_step_is_told():
    class Slow(Dataset):
        def epoch(self, epoch, start=0):
            for batch in super().epoch(epoch, start):
                time.sleep(0.01)
                yield batch

    steps = StepSchedule(Slow(), 3, 1.0).steps(Position(), 3)
    assert next(steps)[1] >= 0.03 and next(steps)[1] >= 0.03
