"""The probe's figures, on numbers made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle3_utils.serving.probing import gates

TARGET = SimpleNamespace(hidden_size=4, num_layers=3, logit_scale=1.0, logit_softcap=None, rms_norm_eps=1e-6)


def dump(num_tokens: int = 3, num_aux: int = 2, **changes) -> SimpleNamespace:
    fields = {
        "input_ids": torch.arange(num_tokens),
        "aux": torch.ones(num_tokens, num_aux, 4),
        "final": torch.ones(num_tokens, 4),
        "hidden": None,
    }
    return SimpleNamespace(**(fields | changes))


def problem(found, ids=(0, 1, 2), dtype=torch.float32):
    return gates.content_problem(found, list(ids), 2, TARGET, dtype)


def test_a_sound_dump_has_no_problem():
    assert problem(dump()) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (dump(input_ids=torch.tensor([0, 2, 1])), "token ids differ"),
        (dump(num_aux=3), "aux is (3, 3, 4), not (3, 2, 4)"),
        (dump(final=torch.ones(2, 4)), "final is (2, 4), not (3, 4)"),
        (dump(final=torch.ones(3, 4, dtype=torch.bfloat16)), "final is torch.bfloat16"),
        (dump(final=torch.full((3, 4), float("nan"))), "12 values that are not finite"),
        (dump(aux=torch.zeros(3, 2, 4)), "aux has rows of zeros"),
    ],
)
def test_each_problem_of_a_dump_is_named(found, words):
    assert words in problem(found)


def test_log_probabilities_are_those_of_a_softmax_over_lm_head():
    final = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    lm_head = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    # logits of row 0 are (1, 0): log p(1) = -log(1 + e)
    expected = -torch.log(torch.tensor(1.0) + torch.e)
    ids = torch.tensor([0, 1])
    assert gates.logprob_errors(
        final, ids, [float(expected)], lm_head, TARGET, torch.float32
    ).tolist() == pytest.approx([0], abs=1e-6)
    assert gates.logprob_errors(
        final, ids, [float(expected) - 0.5], lm_head, TARGET, torch.float32
    ).item() == pytest.approx(0.5)


def test_soft_cap_and_scale_belong_to_the_log_probabilities():
    target = SimpleNamespace(logit_scale=2.0, logit_softcap=3.0)
    final, lm_head = torch.tensor([[1.0], [0.0]]), torch.tensor([[4.0], [0.0]])
    capped = 3 * torch.tanh(torch.tensor(8.0) / 3)
    expected = float(-torch.log(1 + torch.exp(capped)))
    assert gates.logprob_errors(final, torch.tensor([0, 1]), [expected], lm_head, target, torch.float32).item() < 1e-6


def layered(*directions: int) -> torch.Tensor:
    """[T = 4, len(directions), 8]: unit vectors along the given axes."""
    return torch.eye(8)[list(directions)].expand(4, -1, -1)


def test_layers_are_recognised_by_their_values():
    cosines = gates.match_boundaries(layered(2, 5), layered(0, 1, 2, 3, 4, 5))
    assert cosines.shape == (2, 6)
    gate, rows = gates.layer_gate("layers", cosines, [2, 5], 0.99)
    assert gate.passed and [row["found_boundary"] for row in rows] == [2, 5]


def test_layers_shifted_by_one_are_recognised():
    gate, rows = gates.layer_gate("layers", gates.match_boundaries(layered(3), layered(0, 1, 2, 3, 4)), [2], 0.99)
    assert not gate.passed and rows[0]["found_boundary"] == 3


def test_a_match_that_a_neighbour_nearly_equals_does_not_pass():
    gate, _ = gates.layer_gate("layers", torch.tensor([[0.1, 0.995, 0.994]]), [1], 0.99)
    assert not gate.passed
    gate, _ = gates.layer_gate("layers", torch.tensor([[0.1, 0.999, 0.985]]), [1], 0.99)
    assert gate.passed


def anchored(hidden: torch.Tensor, final: torch.Tensor, weight: torch.Tensor):
    return gates.anchor_gate(hidden, final, hidden[:, 0], weight, TARGET)


def test_both_ends_of_an_all_boundaries_dump_are_anchored():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, 4), torch.rand(4) + 0.5
    last = hidden[:, -1]
    final = last / last.pow(2).mean(-1, keepdim=True).sqrt() * weight
    assert anchored(hidden, final, weight).passed
    assert anchored(hidden, final, weight - 1).passed, "Gemma stores the weight minus 1"
    assert not anchored(hidden, last, weight).passed, "a final state from before the norm"
    assert not anchored(hidden[:, :3], final, weight).passed, "a boundary is missing"
    wrong_start = gates.anchor_gate(hidden, final, hidden[:, 1], weight, TARGET)
    assert not wrong_start.passed


def test_the_same_dump_is_invariant_and_another_is_not():
    torch.manual_seed(0)
    one = dump(aux=torch.randn(3, 2, 4), final=torch.randn(3, 4))
    other = dump(aux=torch.randn(3, 2, 4), final=one.final)
    assert gates.likeness(one, one) == pytest.approx((1.0, 1.0, 0.0))
    assert gates.likeness(other, one).mean < 0.9


def changed_in_eight_rows(change) -> gates.Likeness:
    """The likeness of 500 rows of which eight of `final` are replaced by `change(final)`'s."""
    torch.manual_seed(0)
    one = dump(500, aux=torch.randn(500, 2, 64) + 0.5, final=torch.randn(500, 64) + 0.5)
    mixed = dump(500, aux=one.aux.clone(), final=one.final.clone())
    mixed.final[100:108] = change(one.final)[100:108]
    return gates.likeness(mixed, one)


@pytest.mark.parametrize(
    "change", [lambda final: final.roll(1, 0), lambda final: torch.randn(500, 64) + 0.5, torch.zeros_like]
)
def test_a_few_rows_of_something_else_hardly_move_the_mean_but_are_counted(change):
    mean, _, stray = changed_in_eight_rows(change)
    assert mean > 0.98 and stray == pytest.approx(8 / 500)


def test_a_run_of_equal_tokens_may_be_as_alike_as_one_token_in_two_batches():
    torch.manual_seed(0)
    tokens, noise = torch.randn(30, 1, 64).expand(30, 16, 64).reshape(480, 64), torch.randn(2, 480, 64) * 0.15
    one, two = (dump(480, aux=(tokens + each)[:, None], final=tokens + each) for each in noise)
    assert gates.likeness(one, two).stray > 0.5, "where every token is another"
    one.input_ids = two.input_ids = torch.arange(30).repeat_interleave(16)
    assert gates.likeness(one, two).stray == 0.0


def test_values_that_are_not_finite_are_like_nothing():
    torch.manual_seed(0)
    one = dump(500, aux=torch.randn(500, 2, 64), final=torch.randn(500, 64))
    broken = dump(500, aux=one.aux, final=torch.full((500, 64), float("nan")))
    assert gates.likeness(broken, one) == (-1.0, -1.0, 1.0)


def test_rows_whose_experts_changed_are_less_like_themselves_but_no_strays():
    mean, _, stray = changed_in_eight_rows(lambda final: final + 0.8 * torch.randn(500, 64))
    assert 0.98 < mean < 1 and stray == 0


def test_log_probabilities_of_a_long_sample_are_rebuilt_at_positions_spread_over_it():
    torch.manual_seed(0)
    final, lm_head, ids = torch.randn(1000, 4), torch.randn(8, 4), torch.randint(0, 8, (1000,))
    served = torch.log_softmax(final[:-1] @ lm_head.T, -1).gather(1, ids[1:, None]).squeeze(1)
    errors = gates.logprob_errors(final, ids, served.tolist(), lm_head, TARGET, torch.float32, max_positions=10)
    assert errors.shape == (10,) and errors.max() < 1e-5
    served[[0, -1]] += 0.5  # first and last are among them
    errors = gates.logprob_errors(final, ids, served.tolist(), lm_head, TARGET, torch.float32, max_positions=10)
    assert errors[[0, -1]].tolist() == pytest.approx([0.5, 0.5], abs=1e-5)
