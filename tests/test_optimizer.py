"""AdamW with masters, the schedule, and clipping by the global norm."""

import pytest
import torch

from eagle3_utils.draft.training.optimizer import MasterAdamW, cosine_with_warmup


def test_schedule_warms_up_and_ends_at_a_tenth():
    rates = [cosine_with_warmup(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1, abs=1e-3)


def test_masters_collect_steps_too_small_for_bfloat16():
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([parameter], max_grad_norm=1e9)
    for _ in range(100):
        parameter.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step(1e-4, optimizer.grad_norm())
    assert torch.equal(parameter.detach(), torch.full((4,), 0.99).bfloat16())


def test_clip_scales_by_the_global_norm():
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = MasterAdamW([a, b], max_grad_norm=1.0)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert optimizer.grad_norm() == pytest.approx(5.0)
    optimizer.step(0.0, 5.0)
    moments = [optimizer.adam.state[p]["exp_avg"].item() for p in optimizer.masters]
    assert moments == pytest.approx([0.1 * 3 / 5, 0.1 * 4 / 5], rel=1e-4)
