"""The Triton kernels for own keys on a GPU, at the head shapes of real drafts."""

import pytest
import torch

from eagle3_utils.draft.unrolling import own_keys

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES = {
    "kimi": (64, 8, 128, 128),
    "llama-8b": (32, 8, 128, 128),
    "smollm2": (9, 3, 64, 64),
    "mla": (64, 64, 192, 128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_chosen_and_agree_with_the_formulas(name):
    num_heads, num_kv, width, value_width = SHAPES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    merge, gradients = own_keys._on_cuda(device, torch.bfloat16, *SHAPES[name])
    assert merge.__module__.endswith("own_keys_kernels")  # or a warning says why not
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    places = torch.randperm(600, generator=generator, device=device)[:500]
    query, upstream = random(500, num_heads, width), random(500, num_heads, value_width)
    keys, values = random(500, 6, num_kv, width), random(500, 6, num_kv, value_width)
    attended, by_place, lse = (
        random(600, num_heads, value_width),
        random(600, num_heads, width),
        random(num_heads, 600).T,
    )
    work = lse.float(), places, query, keys, values, width**-0.5
    found, expected = merge(attended, *work), own_keys.merge_plainly(attended, *work)
    rest = query, keys, values, width**-0.5, by_place, places
    found += gradients(upstream, *expected, *rest)
    expected += own_keys.gradients_plainly(upstream, *expected, *rest)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.01
