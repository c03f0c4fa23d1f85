import numpy as np
import pytest
import torch

from eagle3_utils.errors import UserError
from eagle3_utils.states.codec import (
    CodecReport,
    count_not_finite,
    decode,
    encode,
    measure_codec,
    round_trip,
    supervised_rows,
)
from eagle3_utils.states.store import Sample


def test_row_r_is_supervised_when_token_r_plus_1_is():
    rows = supervised_rows(np.array([0, 0, 1, 1, 0, 1], np.uint8))
    assert rows.tolist() == [False, True, True, False, True, False]


def test_bf16_keeps_every_bit_without_a_copy():
    states = torch.randn(5, 3, 8).bfloat16()
    stored, scale = encode(states, "bf16")
    assert scale is None and stored.dtype == np.uint16
    assert stored.__array_interface__["data"][0] == states.data_ptr()
    assert torch.equal(decode(stored, None), states)


def test_fp8_takes_one_scale_per_token_and_layer():
    states = torch.randn(7, 3, 64).bfloat16()
    states[:, 0] *= 1000  # an early layer with massive activations
    stored, scale = encode(states, "fp8")
    assert stored.dtype == np.uint8 and scale.shape == (7, 3)
    expected = states.float().abs().amax(-1) / 448
    assert np.allclose(scale, expected.numpy(), rtol=1e-6)
    errors = (decode(stored, scale).float() - states.float()).norm(dim=-1) / states.float().norm(dim=-1)
    assert errors.max() < 0.04  # e4m3: half a step of 1/8 at most, 2.6 % on average, in every layer


def test_fp8_keeps_zeros_and_the_largest_value():
    states = torch.zeros(2, 4).bfloat16()
    states[1, 2] = -3.0
    assert torch.equal(round_trip(states, "fp8"), states)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -float("nan")])
def test_values_that_are_not_finite_are_counted(value):
    states = torch.randn(4, 5).bfloat16()
    assert count_not_finite(states) == 0
    states[2, 3] = value
    assert count_not_finite(states) == 1


def test_largest_finite_values_pass():
    states = torch.tensor([torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min]).bfloat16()
    assert count_not_finite(states) == 0


def test_measured_error_equals_numpy():
    torch.manual_seed(0)
    aux, final = torch.randn(6, 2, 32).bfloat16(), torch.randn(6, 32).bfloat16()
    mask = np.array([0, 1, 1, 0, 1, 1], np.uint8)
    head = torch.randn(50, 32)
    sample = Sample("a", np.arange(6, dtype=np.int32), mask, aux, final)
    report = measure_codec([sample], "fp8", [3, 9], lambda states: states.float() @ head.T)

    got = round_trip(aux, "fp8").double().numpy()
    want = aux.double().numpy()
    errors = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert np.allclose(report.mean_relative_error[:2], errors.mean(0), rtol=1e-4)
    assert np.allclose(report.worst_relative_error[:2], errors.max(0), rtol=1e-4)
    assert report.layers == ["layer 3", "layer 9", "final"]

    rows = [0, 1, 3, 4]  # the rows before a supervised token
    logits = [states.double().numpy()[rows] @ head.double().numpy().T for states in (final, round_trip(final, "fp8"))]
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
    assert report.num_supervised == 4
    assert report.mean_kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-3)
    assert report.argmax_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert "token_errors" not in report.summary() and len(report.rows()) == 3


def test_bf16_is_measured_as_lossless():
    sample = Sample(
        "a",
        np.arange(3, dtype=np.int32),
        np.ones(3, np.uint8),
        torch.randn(3, 1, 8).bfloat16(),
        torch.randn(3, 8).bfloat16(),
    )
    report = measure_codec([sample], "bf16", [1], lambda states: pytest.fail("a large target's head takes minutes"))
    assert (report.mean_kl, report.argmax_agreement, report.worst_relative_error) == (0.0, 1.0, [0.0, 0.0])


@pytest.mark.parametrize(
    ("kl", "agreement", "num_supervised", "reason"),
    [
        (0.03, 0.99, 64, r"mean KL 0.03 \(at most 0.02\)"),
        (0.01, 0.96, 64, r"agreement 0.9600 \(at least 0.97\)"),
        (float("nan"), 1.0, 64, "mean KL nan"),
        (0.0, 1.0, 0, "no row of the pilot is supervised"),
    ],
)
def test_a_codec_beyond_its_thresholds_or_that_was_not_judged_stops_the_run(kl, agreement, num_supervised, reason):
    CodecReport("fp8", num_supervised=64, mean_kl=0.02, argmax_agreement=0.97).require(0.02, 0.97)
    report = CodecReport("fp8", num_supervised=num_supervised, mean_kl=kl, argmax_agreement=agreement)
    with pytest.raises(UserError, match=reason):
        report.require(0.02, 0.97)
