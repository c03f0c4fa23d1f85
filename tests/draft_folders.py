"""Fixtures of the tests on draft folders: a tiny target, a fresh draft for it, and its export."""

import pytest
import torch

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.export import export_draft
from eagle3_utils.draft.training.build import new_draft
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.target import load_target

LAYERS = [1, 2, 4]


@pytest.fixture(scope="module")
def target(tiny_llama):
    return load_target(str(tiny_llama))


@pytest.fixture
def draft(target):
    vocab = vocab_map_of(torch.arange(0, 512, 2), target.vocab_size)
    return new_draft(TrainConfig(draft_vocab_size=256), target, LAYERS, vocab)


@pytest.fixture
def exported(draft, target, tmp_path):
    return export_draft(draft, target, tmp_path / "draft")
