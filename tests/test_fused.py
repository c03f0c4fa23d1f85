"""Hand-written backward passes against autograd; gradients of repeated uses add up in place."""

import torch
import torch.nn.functional as F

from eagle3_utils.draft.modules.fused import fused, halves, linear, normed_gated_mlp, normed_linears, rows_of


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def test_normed_gated_mlp_has_the_gradients_autograd_gives_over_several_uses():
    tensors = leaves((6, 4), (4,), (9, 4), (9, 4), (4, 9))
    plain = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    x, norm, *weights = tensors
    normed_gated_mlp(normed_gated_mlp(x, norm, 1e-5, *weights), norm, 1e-5, *weights).square().sum().backward()
    x, norm, gate, up, down = plain
    for _ in range(2):
        normed = rms_norm(x, norm)
        x = (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    x.square().sum().backward()
    for ours, theirs in zip(tensors, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-4)


def test_normed_linears_have_the_gradients_autograd_gives():
    tensors = leaves((6, 4), (4,), (3, 4), (5, 4))
    plain = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    x, norm, *weights = tensors
    first, second = normed_linears(x, norm, 1e-5, *weights)
    (first.square().sum() + second.sin().sum()).backward()
    x, norm, *weights = plain
    first, second = (rms_norm(x, norm) @ weight.T for weight in weights)
    (first.square().sum() + second.sin().sum()).backward()
    for ours, theirs in zip(tensors, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_linear_adds_to_a_gradient_that_is_there_and_spares_a_frozen_weight():
    x, weight = leaves((5, 3), (2, 3))
    for _ in range(2):
        linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.detach().sum(0).expand(2, 3))
    frozen = weight.detach()
    linear(x, frozen).sum().backward()
    assert frozen.grad is None
    torch.testing.assert_close(x.grad, 3 * weight.detach().sum(0).expand(5, 3))


def test_rows_of_a_leaf_and_of_a_result_have_the_same_gradient():
    (leaf,) = leaves((5, 3))
    result, first, second = leaf.detach().clone().requires_grad_(), torch.tensor([4, 0, 2]), torch.tensor([0, 3])
    for x in (leaf, result * 1.0):
        (rows_of(x, first).square().sum() + rows_of(x, second).sin().sum()).backward()
    torch.testing.assert_close(leaf.grad, result.grad)
    assert leaf.grad[1].count_nonzero() == 0 and leaf.grad[0].count_nonzero() == 3


def test_halves_of_a_weight_have_their_gradients_added_in_place():
    tensors = leaves((6, 4), (4,), (3, 8), (5, 4))
    plain = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    x, norm, weight, other = tensors
    left, right = halves(weight)
    for _ in range(2):
        first, second = normed_linears(x, norm, 1e-5, right, other)
        (linear(x, left) * first).sum().add(second.sin().sum()).backward()
    x, norm, weight, other = plain
    for _ in range(2):
        normed = rms_norm(x, norm)
        ((x @ weight[:, :4].T) * (normed @ weight[:, 4:].T)).sum().add((normed @ other.T).sin().sum()).backward()
    for ours, theirs in zip(tensors, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_fused_function_is_the_plain_one_off_the_gpu():
    calls = []

    @fused
    def double(x):
        calls.append(type(x))
        return 2 * x

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0)) and calls == [torch.Tensor]
