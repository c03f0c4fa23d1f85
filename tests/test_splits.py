"""The train and the val split as batches: apart from each other, shared out over ranks."""

import pytest
import torch

from eagle3_utils.draft.training.distributed import ONE_RANK, Ranks
from eagle3_utils.draft.training.splits import open_splits
from eagle3_utils.errors import UserError
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.store import StoreWriter

pytest_plugins = ["draft_runs"]  # fixtures


def test_a_sample_of_both_splits_is_refused_by_name(make_config, states, tmp_path):
    """Of one run's train and another's val: it would be validated on what it has learnt."""
    other = tmp_path / "other"
    for split, source, ids in (("train", "train", ["train-9"]), ("val", "train", ["train-1", "train-3", "val-99"])):
        reader = StoreReader(states / "hidden_states" / source)
        with StoreWriter(other / "hidden_states" / split, reader.meta, shard_bytes=1 << 28) as writer:
            for index, name in enumerate(ids):
                sample = reader.read(index)
                sample.id = name
                writer.add(sample)
    with pytest.raises(UserError, match="2 samples of the train split are in the val split too: train-1, train-3") as e:
        open_splits(make_config(more_data=[str(other)]), ONE_RANK)
    assert str(other / "hidden_states" / "val") in str(e.value) and "out of more_data" in e.value.fix


def test_ranks_share_the_batches_of_both_and_one_may_have_none_to_validate(make_config):
    config = make_config(max_tokens_per_step=256, batches_per_step=2)
    train, val = zip(*(open_splits(config, Ranks(rank, 2, torch.device("cpu"))) for rank in (0, 1)), strict=True)
    assert [data.num_batches(0) for data in train] == [1, 1]
    assert [data.num_batches(0) for data in val] == [1, 0]
    alone_train, alone_val = open_splits(config, ONE_RANK)
    assert alone_train.plan(0) == train[0].plan(0) + train[1].plan(0)
    assert alone_val.plan(0) == val[0].plan(0)
