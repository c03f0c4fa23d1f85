"""The teacher's distribution, coverage and mass, against the whole vocabulary's logits."""

from types import SimpleNamespace

import torch

from eagle3_utils.draft.unrolling.teacher import Teacher

IDS = torch.tensor([1, 3, 4])


def whole_logits(final, head, scale=1.0, cap=None):
    logits = final @ head.T * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)


def test_distribution_coverage_and_mass_are_those_of_the_whole_vocabulary():
    generator = torch.Generator().manual_seed(0)
    head, final = torch.randn(7, 5, generator=generator), torch.randn(40, 5, generator=generator)
    target = SimpleNamespace(logit_scale=0.5, logit_softcap=2.0)
    teacher = Teacher(head, IDS, target)
    output = teacher(final, teacher.outside(final, want_mass=True))
    logits = whole_logits(final, head, 0.5, 2.0)
    torch.testing.assert_close(output.probabilities, logits[:, IDS].softmax(-1))
    best = logits.argmax(-1)
    assert torch.equal(output.covered, torch.isin(best, IDS))
    assert torch.equal(IDS[output.best][output.covered], best[output.covered])
    torch.testing.assert_close(output.mass, logits.softmax(-1)[:, IDS].sum(-1))
    assert 0 < int(output.covered.sum()) < 40


def test_known_coverage_is_taken_as_it_is_and_spares_the_rest_of_the_head():
    head, final = torch.randn(7, 5), torch.randn(4, 5)
    teacher = Teacher(head, IDS, SimpleNamespace(logit_scale=1.0, logit_softcap=None))
    teacher.outside_head = torch.full_like(teacher.outside_head, float("nan"))
    known = torch.tensor([True, False, True, True])
    output = teacher(final, teacher.outside(final, known))
    assert torch.equal(output.covered, known) and output.mass is None


def test_full_vocabulary_covers_everything():
    head, final = torch.randn(7, 5), torch.randn(4, 5)
    plain = SimpleNamespace(logit_scale=1.0, logit_softcap=None)
    teacher = Teacher(head, torch.arange(7), plain)
    output = teacher(final, teacher.outside(final, want_mass=True))
    assert output.covered.all() and output.mass is None  # all of the mass
