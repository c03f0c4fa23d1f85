"""Teacher-forced figures beside a slot-by-slot recomputation; intervals beside their textbook values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import AUX_LAYERS, VOCAB, small_draft, small_model

from eagle3_utils.acceptance import offline
from eagle3_utils.acceptance.forward import packed_samples
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.speculate import plain_decode
from eagle3_utils.devices import one_torch_thread
from eagle3_utils.draft.metrics import StepCounts, accept_length
from eagle3_utils.draft.network import DraftCache
from eagle3_utils.draft.unrolling.teacher import Teacher

NUM_STEPS = 3


@pytest.fixture(scope="module")
def model():
    with one_torch_thread():
        yield small_model()


@pytest.fixture(scope="module")
def draft(model):
    return small_draft(model)


@pytest.fixture(scope="module")
def batches(model):
    prompts = [Prompt(f"p{n}", "chat" if n % 2 else "maths", [3, n, 4]) for n in range(5)]
    outputs = [plain_decode(model, prompt.input_ids, 14).output_ids for prompt in prompts]
    return packed_samples(model, prompts, outputs, AUX_LAYERS)


@pytest.fixture(scope="module")
def samples(model, draft, batches):
    plain_logits = SimpleNamespace(logit_scale=1.0, logit_softcap=None)
    teacher = Teacher(model.lm_head.weight.detach(), draft.target_ids, plain_logits)
    return offline.count_samples(draft, teacher, batches, NUM_STEPS)


def slot_by_slot(model, draft, batch):
    """(supervised, correct, out of vocabulary, overlap) per slot and step, decoding each slot's chain on its own."""
    ids, mask = batch.input_ids, batch.loss_mask
    probs = model(ids[None]).logits[0].softmax(-1)
    found = {}
    for slot in range(len(ids) - 2):
        cache = DraftCache()
        hidden, logits = draft.decode_step(
            draft.project(batch.aux[: slot + 1]), ids[1 : slot + 2], torch.arange(slot + 1), cache
        )
        for step in range(NUM_STEPS):
            predicted = slot + 2 + step
            if predicted >= len(ids):
                break
            if step:
                hidden, logits = draft.decode_step(
                    hidden[-1:], ids[slot + 1 + step][None], torch.tensor([slot + step]), cache
                )
            if not mask[predicted]:
                continue
            choice, best = int(draft.target_ids[logits[-1].argmax()]), int(probs[predicted - 1].argmax())
            spread = torch.zeros(VOCAB)
            spread[draft.target_ids] = logits[-1].softmax(-1)
            overlap = float(torch.minimum(spread, probs[predicted - 1]).sum())
            found[slot, step] = (choice == best, best in (0, 7), overlap)
    return found


@torch.no_grad()
def test_counts_equal_decoding_every_slot_on_its_own(model, draft, batches, samples):
    for batch, sample in zip(batches, samples, strict=True):
        found = slot_by_slot(model, draft, batch)
        for step in range(NUM_STEPS):
            here = [value for (_, at), value in found.items() if at == step]
            assert sample.counts.supervised[step] == len(here)
            assert sample.counts.correct[step] == sum(correct for correct, _, _ in here)
            assert sample.counts.out_of_vocab[step] == sum(missing for _, missing, _ in here)
            assert sample.counts.overlap[step] == pytest.approx(sum(overlap for _, _, overlap in here), rel=1e-4)
            slots = {slot for slot, at in found if at == 0}
            alive = [
                slot
                for slot in slots
                if all((slot, at) in found for at in range(step + 1)) and all(found[slot, at][0] for at in range(step))
            ]
            assert sample.counts.alive[step] == len(alive)
            assert sample.counts.accepted[step] == sum(found[slot, step][0] for slot in alive)


def test_summary_by_source_pools_counts_and_all_is_their_sum(samples):
    summary = offline.summarise(samples, num_resamples=50)
    assert set(summary) == {"all", "chat", "maths"}
    chat = [sample.counts for sample in samples if sample.source == "chat"]
    pooled = sum(chat[1:], start=chat[0])
    assert summary["chat"]["accuracy"][1].value == pytest.approx(float(pooled.correct[1] / pooled.supervised[1]))
    expected = accept_length((pooled.accepted / pooled.alive.clamp(min=1)).tolist())
    assert summary["chat"]["accept_length"][-1].value == pytest.approx(expected)
    assert summary["chat"]["num_samples"] + summary["maths"]["num_samples"] == summary["all"]["num_samples"] == 5
    assert summary["all"]["accept_length"][0].value == pytest.approx(1 + summary["all"]["conditional"][0].value)


def one_step(correct):
    counts = StepCounts.zeros(1)
    counts.supervised += 100
    counts.alive += 100
    counts.correct += correct
    counts.accepted += correct
    return counts


def test_the_interval_is_that_of_the_mean_over_samples_not_over_tokens():
    """200 samples of 100 tokens whose accuracy is 0.2 or 0.8: σ of the mean is 0.3 / √200, not √(0.25 / 20,000)."""
    samples = [offline.SampleCounts(str(n), "chat", one_step(20 if n % 2 else 80)) for n in range(200)]
    found = offline.summarise(samples, num_resamples=4000)["chat"]["accuracy"][0]
    assert found.value == 0.5
    half_width = 1.96 * 0.3 / np.sqrt(200)
    assert found.low == pytest.approx(0.5 - half_width, abs=0.004)
    assert found.high == pytest.approx(0.5 + half_width, abs=0.004)
