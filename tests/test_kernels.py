"""Which FlashAttention kernels are used: version 4 only where it is there and agrees with version 2."""

import logging

import pytest
import torch

from eagle3_utils.draft.unrolling import kernels

DEVICE = torch.device("cpu")


def plain(factor):
    """Stand-ins for a version's two passes; the numbers of the second version are `factor` times the first's."""

    def compute(query, keys, values, spans, scale):
        return query * factor, query.sum(-1).T * factor

    def differentiate(upstream, query, attended, keys, values, lse, spans, scale):
        return upstream * factor, keys * factor, values * factor

    return compute, differentiate


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    kernels._kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_forward_2", plain(1.0)[0])
    monkeypatch.setattr(kernels, "_backward_2", plain(1.0)[1])
    yield
    kernels._kernels.cache_clear()


def chosen(width=128):
    return kernels._kernels(DEVICE, width, 4, torch.float32)


def test_version_4_is_used_where_it_agrees(monkeypatch):
    agreeing = plain(1.001)
    monkeypatch.setattr(kernels, "_version_4", lambda: agreeing)
    assert chosen() is agreeing


def test_version_4_is_not_believed_where_it_differs(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_version_4", lambda: plain(1.1))
    with caplog.at_level(logging.WARNING):
        assert chosen() == (kernels._forward_2, kernels._backward_2)
    assert "it differs by 0.1" in caplog.text


def test_without_version_4_its_absence_is_said(monkeypatch, caplog):
    def missing():
        raise ImportError("No module named 'flash_attn'")

    monkeypatch.setattr(kernels, "_version_4", missing)
    with caplog.at_level(logging.WARNING):
        assert chosen() == (kernels._forward_2, kernels._backward_2)
    assert "not used: ImportError" in caplog.text


def test_other_widths_and_older_gpus_keep_version_2(monkeypatch):
    monkeypatch.setattr(kernels, "_version_4", lambda: pytest.fail("was asked for"))
    assert chosen(width=64) == (kernels._forward_2, kernels._backward_2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert chosen() == (kernels._forward_2, kernels._backward_2)


def test_values_narrower_than_keys_are_filled_up_with_zeros(monkeypatch):
    def compute(query, keys, values, spans, scale):
        assert values.shape == keys.shape and not values[..., 5:].any()
        return query + 1, query.sum(-1).T

    def differentiate(upstream, query, attended, keys, values, lse, spans, scale):
        for narrow in (upstream, attended, values):
            assert narrow.shape[-1] == query.shape[-1] and not narrow[..., 5:].any()
        return query, keys, values * 2

    monkeypatch.setattr(kernels, "_kernels_for", lambda query, keys: (compute, differentiate))
    query, keys, values = torch.randn(4, 6, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 5)
    attended, lse = kernels.forward(query, keys, values, None, 1.0)
    assert torch.equal(attended, query[..., :5] + 1) and lse.shape == (4, 6)
    by_query, by_keys, by_values = kernels.backward(attended, query, attended, keys, values, lse, None, 1.0)
    assert by_query is query and by_keys is keys and torch.equal(by_values, values * 2)
