"""Parity: equal figures pass; a fault planted in the served draft is named among all that are tried."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_models import AUX_LAYERS, small_model, trained_draft

from eagle3_utils.acceptance import forward, heldout, parity
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.speculate import plain_decode
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.devices import one_torch_thread

SHAPE, TARGET = TreeShape(3), SimpleNamespace(num_layers=5)


@pytest.fixture(scope="module")
def model():
    with one_torch_thread():
        yield small_model()


@pytest.fixture(scope="module")
def draft(model, batches_of):
    return trained_draft(model, batches_of(AUX_LAYERS))


@pytest.fixture(scope="module")
def batches_of(model):
    prompts = [Prompt(str(n), "chat", [n % 12, n // 2, 3]) for n in range(4)]
    outputs = [plain_decode(model, prompt.input_ids, 20).output_ids for prompt in prompts]

    def of(aux_layers):
        return forward.packed_samples(model, prompts, outputs, [layer % 3 for layer in aux_layers])

    return of


def accepted(draft, batches_of):
    return [heldout.replay(draft, batch, SHAPE) for batch in batches_of(draft.config.aux_layers)]


def test_shares_are_of_all_verifications_and_sum_to_the_accept_length():
    shares = parity.accepted_shares([[0, 3], [1, 1]], 3)
    assert shares == [3 / 4, 1 / 4, 1 / 4]
    assert 1 + sum(shares) == (1 + 4 + 2 + 2) / 4
    assert parity.accepted_shares([], 2) == [0.0, 0.0]


def test_the_same_draft_passes_and_the_text_says_so(draft, batches_of):
    offline = accepted(draft, batches_of)
    report = parity.compare(offline, offline, 3)
    assert report.passed and report.distance == 0 and report.causes == []
    assert report.num_verifications == sum(map(len, offline))
    assert "parity PASSED" in report.text()


def test_the_sound_draft_is_not_blamed_on_a_fault_that_changes_little(draft, batches_of):
    served = accepted(draft, batches_of)
    report = parity.compare(served, served, 3)
    report = parity.diagnose(report, draft, TARGET, batches_of, SHAPE, served)
    assert report.passed and report.causes == [] and "explained by" not in report.text()


def trial(fault, distance, mismatch):
    return parity.Trial(fault, [], distance, mismatch)


def test_a_fault_within_the_tolerance_is_found_by_which_prompts_accept_what():
    """Sums agree (as they do for a weak draft and a wrong layer), prompts do not, and one fault explains them."""
    report = parity.compare([[1, 0], [0, 1]], [[1, 1], [0, 0]], 1)
    assert report.distance == 0 and report.mismatch == 0.5 and report.passed
    trials = [trial("wrong layer", 0.001, 0.05), trial("rope", 0.002, 0.45), trial("far off", 0.4, 0.01)]
    report = replace(report, trials=trials)
    assert not report.passed and report.causes == ["wrong layer"]


def test_a_fault_that_explains_hardly_more_than_nothing_is_no_cause():
    report = parity.compare([[1, 0], [0, 1]], [[1, 0], [1, 0]], 1)
    assert report.mismatch == 0.0
    report = replace(report, mismatch=0.05, trials=[trial("rope", 0.001, 0.045)])
    assert report.passed and report.causes == []


def test_faults_that_look_alike_are_all_named():
    report = parity.compare([[1, 1]], [[0, 0]], 1)
    report = replace(report, trials=[trial("head", 0.0, 0.001), trial("d2t", 0.0, 0.003), trial("rope", 0.9, 0.9)])
    assert report.causes == ["head", "d2t"] and not report.passed


def test_nothing_compared_is_neither_passed_nor_failed():
    report = parity.ParityReport(left_out="no GPU")
    assert report.passed is None and report.text() == "parity: left out (no GPU)"


@pytest.mark.parametrize(
    "planted", ["layer ids are 1 too high", "d2t holds absolute ids", "lm_head is missing", "the next step takes"]
)
def test_a_planted_fault_is_named_among_all_that_are_tried(draft, batches_of, planted):
    name, broken = next(item for item in parity.faults(draft, TARGET) if item[0].startswith(planted))
    served = accepted(broken, batches_of)
    report = parity.compare(accepted(draft, batches_of), served, 3, tolerance=0.02)
    assert not report.passed
    report = parity.diagnose(report, draft, TARGET, batches_of, SHAPE, served)
    trial = next(trial for trial in report.trials if trial.fault == name)
    assert trial.mismatch == trial.distance == 0.0 == min(trial.distance for trial in report.trials)
    assert name in report.causes and len(report.causes) < len(report.trials)
    assert name in report.text().split("explained by: ")[1].splitlines()[0]
    assert "parity FAILED" in report.text()


def test_figures_that_no_fault_explains_are_not_blamed_on_one(draft, batches_of):
    served = [[2, 0, 2, 0, 3, 1] for _ in range(4)]
    report = parity.compare(accepted(draft, batches_of), served, 3)
    report = parity.diagnose(report, draft, TARGET, batches_of, SHAPE, served)
    assert not report.passed and report.causes == []
    assert "none of the faults tried" in report.text()


def test_faults_leave_the_trained_draft_as_it_was(draft):
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    assert len({name for name, _ in parity.faults(draft, TARGET)}) >= 12
    assert all(tensor.equal(before[name]) for name, tensor in draft.state_dict().items())
    assert draft.config.aux_layers == AUX_LAYERS
