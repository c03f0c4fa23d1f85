"""The training step on a GPU (compiled attention and elementwise parts) against the same step on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
from draft_reference import PLAIN_LOGITS, random_batch, small_model

from eagle3_utils.draft.training.optimizer import MasterAdamW, join_master
from eagle3_utils.draft.unroll import UnrollOptions, training_time_test
from eagle3_utils.draft.unrolling.attention import flex_attention_of
from eagle3_utils.draft.unrolling.flash import attention_for, has_flash
from eagle3_utils.draft.unrolling.groups import unroll_in_groups
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
STEPS = 5
MLA = dict(layer_kind="mla", num_kv_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
           v_head_dim=16)  # fmt: skip


def step(model, head, batch, device, max_rows=None, kind="soft", on_host=False, dtype=torch.float32, attention=None):
    """Loss, counts and gradients by name, on the CPU."""
    model.zero_grad(set_to_none=True)
    model.place(device, dtype, embeddings_on_host=on_host)
    attention = attention or attention_for(model)
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, STEPS)
    teacher = Teacher(head.to(device, dtype), model.target_ids, PLAIN_LOGITS, outside_on_host=on_host)
    options = UnrollOptions(tuple(0.8**i for i in range(STEPS)), loss=kind, chunk_bytes=40_000)
    moved = type(batch)(**vars(batch))
    for name in ("input_ids", "position_ids", "aux", "final"):
        setattr(moved, name, getattr(batch, name).to(device))
    if max_rows is None:
        result = training_time_test(model, moved, plan.to(device), teacher, options, attend=attention(plan))
    else:
        parts = plan.split(max_rows)
        work = [part.to(device) for part in parts], teacher, options, plan.num_supervised, None
        result = unroll_in_groups(model, moved, *work, [attention(part) for part in parts])
    result.loss.backward()
    gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    return float(result.loss.detach()), result.counts.as_tensor().cpu(), gradients


@pytest.mark.parametrize("max_rows", [None, 100])
@pytest.mark.parametrize("changes", [{"head_dim": 16}, MLA], ids=["llama", "mla"])
@pytest.mark.parametrize("kind", ["soft", "lk_lambda"])
def test_gpu_step_equals_cpu_step(changes, max_rows, kind):
    model, head = small_model(**changes)
    for seed, lengths in enumerate(([130, 260, 7], [300, 41])):  # the second finds compiled kernels for other sizes
        batch = random_batch(lengths, seed=seed)
        loss, counts, gradients = step(model, head, batch, "cpu", kind=kind)
        on_gpu = step(model, head, batch, "cuda", max_rows, kind, on_host=max_rows is not None)
        assert on_gpu[0] == pytest.approx(loss, rel=1e-3)
        torch.testing.assert_close(on_gpu[1][0], counts[0])
        for name, expected in gradients.items():
            error = (on_gpu[2][name] - expected).norm() / expected.norm()
            assert float(error) < 2e-2, f"{name}: {float(error):.4f}"


@pytest.mark.parametrize(  # FlashAttention 2, 4 where it is installed, and values narrower than keys
    "changes",
    [{"head_dim": 64}, {"head_dim": 128}, MLA | {"v_head_dim": 24}, MLA | {"v_head_dim": 32}],
    ids=["64", "128", "mla", "mla-wide-values"],
)
@pytest.mark.parametrize("max_rows", [None, 100])
def test_flash_step_equals_flex_step(max_rows, changes):
    model, head = small_model(**changes)
    for seed, lengths in enumerate(([130, 260, 7], [300, 41])):
        common = random_batch(lengths, seed=seed), "cuda", max_rows, "soft", False, torch.bfloat16
        flex = step(model, head, *common, attention=lambda plan: flex_attention_of(plan.to("cuda")))
        assert has_flash(torch.device("cuda"), torch.bfloat16, model.midlayer.self_attn.key_width)
        flash = step(model, head, *common)
        assert flash[0] == pytest.approx(flex[0], rel=1e-2)
        for name, expected in flex[2].items():
            error = (flash[2][name] - expected).float().norm() / expected.float().norm()
            assert float(error) < 3e-2, f"{name}: {float(error):.4f}"


def test_compiled_optimiser_equals_the_plain_one():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3000, generator=generator).bfloat16()
    kept = []
    for device in ("cpu", "cuda"):
        parameter = torch.nn.Parameter(start.clone().to(device))
        optimizer = MasterAdamW([parameter], weight_decay=0.1)
        generator.manual_seed(1)
        for _ in range(10):
            parameter.grad = torch.randn(3000, generator=generator).bfloat16().to(device)
            optimizer.step(1e-2, optimizer.grad_norm())
        kept.append(join_master(parameter.detach(), optimizer.lower_halves[0]).cpu())
    torch.testing.assert_close(kept[0], kept[1], atol=1e-5, rtol=1e-4)
