"""A row's own keys, merged into its attention: beside one softmax over both, and its gradients by autograd."""

import pytest
import torch

from eagle3_utils.draft.unrolling import own_keys


def random_inputs(num_rows=5, num_places=7, num_heads=6, num_kv=2, width=8, value_width=4, num_own=3):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    places = torch.randperm(num_places, generator=generator)[:num_rows]
    query = random(num_rows, num_heads, width)
    keys, values = random(num_rows, num_own, num_kv, width), random(num_rows, num_own, num_kv, value_width)
    return random(num_places, num_heads, value_width), random(num_heads, num_places).T, places, query, keys, values


def test_merged_output_and_gradients_are_those_of_one_softmax():
    attended, lse, places, query, keys, values = random_inputs()
    scale = 0.3
    leaves = [tensor.double().requires_grad_() for tensor in (query, keys, values)]
    q, k, v = leaves
    group = query.shape[1] // keys.shape[2]
    scores = torch.einsum("nae,niae->nia", q, k.repeat_interleave(group, 2)) * scale
    before = lse.double()[places][:, None]  # the keys attended to already, as one key with this score
    weights = torch.cat([before, scores], 1).softmax(1)
    everything = torch.cat([attended.double()[places][:, None], v.repeat_interleave(group, 2)], 1)
    expected = (weights[..., None] * everything).sum(1)
    merged, total = own_keys.merge_own(attended, lse, places, query, keys, values, scale)
    torch.testing.assert_close(merged.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        total.double(), torch.cat([before, scores], 1).logsumexp(1).detach(), atol=1e-5, rtol=1e-5
    )

    upstream = torch.randn(merged.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(upstream.double())
    by_place = torch.zeros(len(attended), *query.shape[1:])  # the score before is held constant here: nothing to add
    found = own_keys.own_gradients(upstream, merged, total, query, keys, values, scale, by_place, places)
    for gradient, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, atol=1e-5, rtol=1e-4)


def test_the_querys_gradient_from_other_keys_is_added_at_its_place():
    attended, lse, places, query, keys, values = random_inputs()
    merged, total = own_keys.merge_own(attended, lse, places, query, keys, values, 0.3)
    by_place = torch.randn(len(attended), *query.shape[1:], generator=torch.Generator().manual_seed(3))
    work = merged, merged, total, query, keys, values, 0.3
    without, with_it = (
        own_keys.own_gradients(*work, part, places)[0] for part in (torch.zeros_like(by_place), by_place)
    )
    torch.testing.assert_close(with_it - without, by_place[places], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fault", [None, "merge", "gradients"])
def test_kernels_are_believed_only_when_they_agree(fault):
    combine, differentiate = own_keys.merge_plainly, own_keys.gradients_plainly

    def broken_merge(*args):
        attended, lse = combine(*args)
        return attended * 1.1, lse

    def broken_gradients(*args):
        by_query, *rest = differentiate(*args)
        return by_query, *(part * 1.1 for part in rest)

    second = {None: (combine, differentiate), "merge": (broken_merge, differentiate),
              "gradients": (combine, broken_gradients)}[fault]  # fmt: skip
    difference = own_keys.largest_difference((combine, differentiate), second, "cpu", torch.float32, 6, 2, 8, 4)
    assert difference == (0 if fault is None else pytest.approx(0.1, rel=0.6))


def test_without_kernels_the_compiled_formulas_are_taken_and_it_is_said(monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setattr(own_keys, "largest_difference", lambda *args: 0.5)
    own_keys._on_cuda.cache_clear()
    chosen = own_keys._on_cuda(torch.device("cpu"), torch.float32, 6, 2, 8, 4)
    own_keys._on_cuda.cache_clear()
    assert [each.__wrapped__ for each in chosen] == [own_keys.merge_plainly, own_keys.gradients_plainly]
    assert "the kernel for own keys is not used: it differs by 0.500" in caplog.text
