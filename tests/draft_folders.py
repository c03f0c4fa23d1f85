"""Fixtures of the tests on draft folders: a tiny target, a fresh draft for it, and its export."""

import pytest
import torch

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft import check
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
    pretend_training(draft)
    return export_draft(draft, target, tmp_path / "draft")


@pytest.fixture
def trained_target(monkeypatch):
    """Lets the tiny random target pass for a trained one: its final norm is not 1 any more, as the check sees it."""
    monkeypatch.setattr(check, "load_final_norm", lambda target: torch.full((target.hidden_size,), 2.0))


@torch.no_grad()
def pretend_training(draft):
    """Leave the initial values in place: matrices get a direction of their own, norms move away from 1."""
    generator = torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            rows, columns = (torch.randn(size, generator=generator).sign() for size in parameter.shape)
            parameter += parameter.std() * torch.outer(rows, columns)
        else:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
