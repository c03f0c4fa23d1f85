"""The unroll against an independent plain model: loss, loss by step, accuracy by step and every gradient."""

import pytest
import torch
from draft_reference import MLA, PLAIN_LOGITS, VOCAB, naive_training_time_test, random_batch, small_model, unroll

from eagle3_utils.draft.unroll import UnrollOptions, training_time_test
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher

STEPS = 4
LENGTHS = [17, 3, 60, 1, 29]


FLAGS = {"fc_norm": True, "norm_output": True}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 0.5}  # fmt: skip
KINDS = [
    ({}, "soft"),
    (FLAGS, "soft"),
    ({"num_kv_heads": 4}, "soft"),
    ({"draft_vocab_size": VOCAB}, "soft"),
    ({"aux_layers": (1, 4), "rope": LLAMA3}, "hard"),
    ({"aux_layers": (0, 1, 2, 4), "rope": LINEAR, **FLAGS}, "lk_alpha"),
    (MLA | FLAGS | {"rope": YARN}, "lk_lambda"),
]


@pytest.mark.parametrize(("changes", "loss"), KINDS)
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_loss_accuracy_and_gradients_equal_the_plain_model(changes, loss, steps):
    model, head = small_model(**changes)
    batch = random_batch(LENGTHS, num_layers=len(model.config.aux_layers))
    result, _ = unroll(model, head, batch, steps, loss=loss)
    result.loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, by_step, accuracy = naive_training_time_test(model, batch, head, steps, loss)
    total.backward()
    assert result.loss.item() == pytest.approx(total.item(), abs=1e-5)
    assert result.counts.summary()["loss"] == pytest.approx([x.item() for x in by_step], abs=1e-5)
    assert [(int(a), int(b)) for a, b in zip(result.counts.correct, result.counts.supervised, strict=True)] == accuracy
    assert steps == 1 or sum(right for right, _ in accuracy) > 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("most_frequent", [True, False])
def test_baseline_and_uncovered_positions_equal_a_plain_count(most_frequent):
    model, head = small_model()
    batch = random_batch(LENGTHS)
    choices, target_ids = (batch.final @ head.T).argmax(-1).tolist(), model.target_ids.tolist()
    token = max(target_ids, key=choices.count) if most_frequent else next(i for i in target_ids if i not in choices)
    result, _ = unroll(model, head, batch, STEPS, baseline_id=target_ids.index(token))
    baseline, outside = [0] * STEPS, [0] * STEPS
    for first, last in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        for step in range(STEPS):
            for predicted in range(first + 2 + step, last):
                if batch.loss_mask[predicted]:
                    choice = choices[int(batch.final_index[predicted - 1])]
                    baseline[step] += choice == token
                    outside[step] += choice not in target_ids
    assert result.counts.baseline.tolist() == baseline and result.counts.out_of_vocab.tolist() == outside
    assert (min(baseline) > 1) == most_frequent and min(outside) > 1


def test_changing_one_document_leaves_the_others_alone():
    model, head = small_model()
    batch = random_batch([10, 12])
    before, _ = unroll(model, head, batch)
    batch.aux[:10] += 1.0
    batch.input_ids[:10] = (batch.input_ids[:10] + 1) % VOCAB
    after, _ = unroll(model, head, batch)
    second = before.slots >= 10
    assert torch.equal(before.correct[second], after.correct[second])
    assert not torch.equal(before.correct[~second], after.correct[~second])


@pytest.mark.parametrize("mask", ["00000000", "01000000"])  # nothing can draft the second token
def test_batch_without_supervised_predictions_has_zero_loss_and_gradients(mask):
    model, head = small_model()
    result, _ = unroll(model, head, random_batch([8], [mask]))
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0
    assert result.counts.supervised.sum() == 0
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.parameters())


def test_known_coverage_changes_nothing():
    model, head = small_model()
    batch = random_batch(LENGTHS)
    first, plan = unroll(model, head, batch)
    options = UnrollOptions(tuple(0.8**i for i in range(STEPS)))
    again = training_time_test(
        model, batch, plan, Teacher(head, model.target_ids, PLAIN_LOGITS), options, covered=first.covered
    )
    assert float(again.loss) == pytest.approx(float(first.loss), abs=1e-6)
    assert torch.equal(again.counts.as_tensor()[:4], first.counts.as_tensor()[:4])


def test_two_halves_with_shared_divisor_equal_the_whole_batch():
    model, head = small_model()
    whole = random_batch([14, 11], seed=3)
    result, plan = unroll(model, head, whole)
    total = 0.0
    for lo, hi in ((0, 14), (14, 25)):
        rows = whole.final_index[lo:hi]
        first = int(rows[rows >= 0].min())
        part = random_batch([hi - lo])
        part.input_ids, part.aux = whole.input_ids[lo:hi], whole.aux[lo:hi]
        part.loss_mask, part.position_ids = whole.loss_mask[lo:hi], whole.position_ids[lo:hi]
        part.final_index = torch.where(rows >= 0, rows - first, -1)
        part.final = whole.final[first : int(rows.max()) + 1]
        half = plan_unroll(part.loss_mask, part.cu_seqlens, part.final_index, STEPS)
        options = UnrollOptions(tuple(0.8**i for i in range(STEPS)))
        teacher = Teacher(head, model.target_ids, PLAIN_LOGITS)
        total += float(training_time_test(model, part, half, teacher, options, plan.num_supervised).loss)
    assert total == pytest.approx(float(result.loss), abs=1e-5)
