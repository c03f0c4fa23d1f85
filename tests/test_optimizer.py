"""AdamW with masters, the schedule, and clipping by the global norm."""

import pytest
import torch

from eagle3_utils.draft.training.optimizer import MasterAdamW, cosine_with_warmup, join_master, split_master


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
    moments = [mean.item() for mean in optimizer.means]
    assert moments == pytest.approx([0.1 * 3 / 5, 0.1 * 4 / 5], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_torchs_adamw_on_float32_masters(dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, generator=generator).to(dtype)
    ours, master = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    optimizer = MasterAdamW([ours], weight_decay=0.1, max_grad_norm=1e9)
    theirs = torch.optim.AdamW([master], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn(40, generator=generator).to(dtype)
        master.grad = ours.grad.float()
        optimizer.step(1e-2, optimizer.grad_norm())
        theirs.step()
    kept = ours if dtype == torch.float32 else join_master(ours.detach(), optimizer.lower_halves[0])
    torch.testing.assert_close(kept.detach(), master.detach(), atol=1e-6, rtol=1e-5)


def test_master_and_its_two_halves_are_the_same_number():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    master = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, 1.00390625, -1.00390625, 3e38])])
    master = master[master.isfinite() & (master.abs() < 3.3e38)]
    weight, lower = split_master(master)
    assert torch.equal(join_master(weight, lower), master)
    close = (weight.float() - master).abs() <= (master.bfloat16().float() - master).abs()
    assert bool(close.all())  # as near as rounding can come
