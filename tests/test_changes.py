"""Changed answers: told apart by how close a call the first other token was."""

import pytest
import torch
from small_models import small_model

from eagle3_utils.acceptance import changes
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.served import NO_DRAFT, ServedAnswer, ServedRun
from eagle3_utils.acceptance.speculate import plain_decode
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.states.extract import one_torch_thread

PROMPT = Prompt("p", "chat", [3, 1, 4])


@pytest.fixture(scope="module")
def model():
    with one_torch_thread():
        yield small_model()


def run(output_ids, draft=NO_DRAFT, concurrency=1):
    answer = ServedAnswer("p", "chat", output_ids, len(output_ids), 0, [], 1.0)
    return ServedRun(draft, None if draft == NO_DRAFT else TreeShape(3), concurrency, 1.0, [answer])


def test_a_near_tie_is_a_close_call_and_a_bad_token_is_not(model, monkeypatch):
    output = plain_decode(model, PROMPT.input_ids, 8).output_ids
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT.input_ids + output[:5]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    other = [*output[:5], second, *output[6:]]
    found = changes.changes(model, {"p": PROMPT}, run(output), run(other))[0]
    assert found.index == 5 and found.distance == pytest.approx(float(logits.max() - logits[second]), abs=1e-5)
    step = (
        2.0 ** torch.tensor(float(logits.max())).abs().log2().floor().item() / 128
    )  # bfloat16: 7 bits after the first
    assert found.allowance == changes._STEPS * step
    monkeypatch.setattr(changes, "_distance", lambda *arguments: (0.1, 0.5))
    assert changes.changes(model, {"p": PROMPT}, run(output), run(other))[0].is_close_call
    monkeypatch.setattr(changes, "_distance", lambda *arguments: (0.6, 0.5))
    assert not changes.changes(model, {"p": PROMPT}, run(output), run(other))[0].is_close_call


def test_drafts_are_compared_at_equal_concurrency_and_batching_alone_is_the_control(model):
    output = plain_decode(model, PROMPT.input_ids, 8).output_ids
    runs = [run(output), run(output, concurrency=8), run(output, "3 · 1 · 4"), run(output[:-1], "3 · 1 · 4", 8)]
    rows = changes.explain(model, [PROMPT], runs)
    assert [row["compared"] for row in rows] == [
        "no draft, 8 in flight with no draft, 1 in flight",
        "3 · 1 · 4, 1 in flight with no draft, 1 in flight",
        "3 · 1 · 4, 8 in flight with no draft, 8 in flight",
    ]
    assert [row["changed"] for row in rows] == [0, 0, 1]
    assert rows[2]["unexplained"] == 1  # an answer that ends early is no close call


def test_without_a_target_changes_are_only_counted():
    row = changes.explain(None, [PROMPT], [run([1, 2]), run([1, 3], "3 · 1 · 4")])[0]
    assert (row["changed"], row["close calls"], row["largest distance (logits)"]) == (1, 0, None)
