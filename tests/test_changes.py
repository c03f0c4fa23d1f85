"""Changed answers: told apart by how close a call the first other token was."""

import copy

import pytest
import torch
from small_models import small_model

from eagle3_utils.acceptance import changes
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.served import NO_DRAFT, ServedAnswer, ServedRun
from eagle3_utils.acceptance.speculate import plain_decode
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.devices import one_torch_thread

PROMPT = Prompt("p", "chat", [3, 1, 4])


@pytest.fixture(scope="module")
def model():
    with one_torch_thread():
        yield small_model()


def run(output_ids, draft=NO_DRAFT, concurrency=1):
    answer = ServedAnswer("p", "chat", output_ids, len(output_ids), 0, [], 1.0)
    return ServedRun(draft, None if draft == NO_DRAFT else TreeShape(3), concurrency, 1.0, [answer])


def other_at(model, output, index):
    """The output with its second best token at `index`, and how far that is below the best."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT.input_ids + output[:index]])).logits[0, -1]
    best, second = logits.topk(2).values
    return [*output[:index], int(logits.topk(2).indices[1]), *output[index + 1 :]], float(best - second)


def test_a_change_is_as_far_off_as_the_worse_token_and_judged_by_the_allowance(model):
    output = plain_decode(model, PROMPT.input_ids, 8).output_ids
    other, below = other_at(model, output, 5)
    for first, second in ((output, other), (other, output)):
        found = changes.changes(model, {"p": PROMPT}, run(first), run(second), below + 0.01)[0]
        assert found.index == 5 and found.distance == pytest.approx(below, abs=1e-5) and found.is_close_call
        assert not changes.changes(model, {"p": PROMPT}, run(first), run(second), below - 0.01)[0].is_close_call
    assert str(found) == f"p, token 5: {below:.3f} below the best"


def test_the_allowance_is_six_times_what_rounding_does_to_the_two_best_logits(model):
    answers = [ServedAnswer("p", "chat", plain_decode(model, PROMPT.input_ids, 20).output_ids, 20, 0, [], 1.0)]
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    ids = torch.tensor([PROMPT.input_ids + answers[0].output_ids[:-1]])
    with torch.no_grad():
        exact, other = model(ids).logits[0, 2:], rounded(ids).logits[0, 2:].float()
    errors = []
    for position in range(20):
        first, second = exact[position].topk(2).indices
        errors.append(
            float(
                (other[position, first] - other[position, second]) - (exact[position, first] - exact[position, second])
            )
        )
    expected = 6 * (sum(error**2 for error in errors) / 20) ** 0.5
    assert changes.rounding_allowance(model, rounded, {"p": PROMPT}, answers) == pytest.approx(expected, rel=1e-3)
    assert changes.rounding_allowance(model, model, {"p": PROMPT}, answers) == changes.ROUNDING  # nothing is rounded


def test_drafts_are_compared_at_equal_concurrency_and_batching_alone_is_the_control(model):
    output = plain_decode(model, PROMPT.input_ids, 8).output_ids
    runs = [run(output), run(output, concurrency=8), run(output, "3 · 1 · 4"), run(output[:-1], "3 · 1 · 4", 8)]
    rows = changes.explain(model, model, [PROMPT], runs)
    assert [(row["run"], row["compared with"]) for row in rows] == [
        ("no draft, 8 in flight", "no draft, 1 in flight"),
        ("3 · 1 · 4, 1 in flight", "no draft, 1 in flight"),
        ("3 · 1 · 4, 8 in flight", "no draft, 8 in flight"),
    ]
    assert [row["changed"] for row in rows] == [0, 0, 1]
    assert rows[2]["unexplained"] == 1  # an answer that ends early is no close call
    assert rows[2]["first unexplained"] == "p, token 7: one answer ends here"


def test_what_is_served_behind_a_stop_token_is_no_part_of_the_answer(model):
    output = [9, 8, 7, 6, 5]
    runs = [run(output[:4]), run(output, "3 · 1 · 4")]
    assert changes.explain(model, model, [PROMPT], runs, stop_ids=[6])[0]["changed"] == 0
    assert changes.explain(model, model, [PROMPT], runs)[0]["unexplained"] == 1


def test_without_a_target_changes_are_only_counted():
    row = changes.explain(None, None, [PROMPT], [run([1, 2]), run([1, 3], "3 · 1 · 4")])[0]
    assert (row["changed"], row["close calls"], row["unexplained"], row["largest distance"]) == (1, None, None, None)
