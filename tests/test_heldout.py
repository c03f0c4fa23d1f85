"""Held-out prompts decoded: that both decodings agree, what is counted, and replay beside real decoding."""

import pytest
import torch
from small_models import AUX_LAYERS, small_draft, small_model

from eagle3_utils.acceptance import forward, heldout
from eagle3_utils.acceptance.heldout import DecodedPrompt
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.speculate import Decoded, plain_decode
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.devices import one_torch_thread


@pytest.fixture(scope="module")
def model():
    with one_torch_thread():
        yield small_model()


@pytest.fixture(scope="module")
def draft(model):
    return small_draft(model)


def decoded(source, num_tokens, num_accepted):
    run = Decoded(list(range(num_tokens)), num_accepted)
    return DecodedPrompt(Prompt("x", source, [1]), run)


def test_accept_length_is_one_and_what_a_verification_accepts_by_source():
    runs = [decoded("chat", 6, [1, 3]), decoded("chat", 4, [0, 0, 0]), decoded("code", 1, [])]
    found = heldout.accept_lengths(runs, num_resamples=100)
    assert set(found) == {"all", "chat"}  # an answer of one token has no verification
    assert found["chat"].value == (6 + 3) / 5
    assert (found["chat"].low, found["chat"].high) == (1.0, 3.0)


def test_acceptance_by_position_is_the_share_that_accepts_one_more():
    num_accepted = [[1, 3], [0, 0, 0]]
    assert heldout.accepted_histogram(num_accepted, 3) == [3, 1, 0, 1]
    found = heldout.acceptance_by_position(num_accepted, 3, num_resamples=200)
    assert [interval.value for interval in found] == [2 / 5, 1 / 2, 1.0]
    assert (found[0].low, found[0].high) == (0.0, 1.0)  # either prompt alone


def test_first_difference_is_the_index_or_none():
    assert heldout.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert heldout.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert heldout.first_difference([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize("shape", [TreeShape(3), TreeShape(3, 3, 8), TreeShape(2, 2, 5, "ancestors")], ids=str)
def test_replay_accepts_what_decoding_accepts(model, draft, shape):
    """All but the last verification, whose tokens may run past the end of the known output."""
    prompts = [Prompt(str(n), "chat", [3, n, 5, 1]) for n in range(3)]
    total = 0
    for item in heldout.decode_prompts(model, draft, prompts, shape, 24, stop_ids=()):
        batch = forward.packed_samples(model, [item.prompt], [item.speculative.output_ids], AUX_LAYERS)[0]
        found = heldout.replay(draft, batch, shape)
        assert found[:-1] == item.speculative.num_accepted[:-1]
        assert len(found) == len(item.speculative.num_accepted)
        whole = heldout.replay(draft, batch, shape, whole=True)
        assert whole == item.speculative.num_accepted[: len(whole)]  # and none is missing but those at the end:
        roots = [sum(found[:number]) + number for number in range(len(found))]
        assert len(whole) == sum(root + shape.num_steps < 24 for root in roots)
        total += sum(found)
    assert total > 0


def test_a_long_sample_is_replayed_in_parts_with_the_same_result(model, draft, monkeypatch):
    item = heldout.decode_prompts(model, draft, [Prompt("a", "chat", [3, 5, 1])], TreeShape(3), 24, stop_ids=())[0]
    batch = forward.packed_samples(model, [item.prompt], [item.speculative.output_ids], AUX_LAYERS)[0]
    whole = heldout.chain_depths(draft, batch, 3)
    monkeypatch.setattr(heldout, "_SLOTS_AT_ONCE", 4)
    assert heldout.chain_depths(draft, batch, 3) == whole and max(whole) > 0
    assert heldout.chain_depths(draft, batch, 3, first_slot=2) == [0, 0, *whole[2:]]
    assert heldout.replay(draft, batch, TreeShape(3)) == heldout._replay_tree(draft, batch, TreeShape(3), 3, 26)


@pytest.mark.parametrize("shape", [TreeShape(3), TreeShape(2, 2, 5)], ids=str)
def test_of_several_turns_the_first_answer_is_replayed_and_of_none_nothing(model, draft, shape):
    prompt = Prompt("a", "chat", [3, 5, 1])
    output_ids = plain_decode(model, prompt.input_ids, 24).output_ids
    batch = forward.packed_samples(model, [prompt], [output_ids], AUX_LAYERS)[0]
    alone = heldout.replay(draft, forward.packed_samples(model, [prompt], [output_ids[:16]], AUX_LAYERS)[0], shape)
    batch.loss_mask[3 + 16 : -2] = False  # a user's turn, and a second answer
    assert heldout.replay(draft, batch, shape) == alone and len(alone) > 1
    batch.loss_mask[:] = False
    assert heldout.replay(draft, batch, shape) == []


def test_the_first_prompts_of_each_source_are_decoded_plainly_too(model, draft):
    prompts = [Prompt(str(n), source, [3, n]) for n, source in enumerate(["chat", "code", "chat", "chat"])]
    done = []
    decoded = heldout.decode_prompts(model, draft, prompts, TreeShape(2), 9, (), 2, done.append)
    assert [item.plain is not None for item in decoded] == [True, True, True, False]
    assert all(item.plain.output_ids == item.speculative.output_ids for item in decoded[:3])
    assert done == [1, 2, 3, 4]


def test_greedy_violations_are_none_for_greedy_output_and_name_a_changed_token_by_its_distance(model, draft):
    prompt = [3, 1, 4]
    output = plain_decode(model, prompt, 12).output_ids
    assert heldout.greedy_violations(model, prompt, output) == []
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output[:5]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    found = heldout.greedy_violations(model, prompt, [*output[:5], second, *output[6:]])
    assert found[0] == (5, pytest.approx(float(logits.max() - logits[second]), rel=1e-3))


def test_items_keep_their_order_each_on_one_core_and_the_setting_comes_back():
    before, cores = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def work(item):
        cores.append(torch.get_num_threads())
        return item * 10

    try:
        assert heldout.map_on_cores(work, [3, 1, 2], torch.device("cpu")) == [30, 10, 20]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert cores == [1, 1, 1]


def test_an_error_in_one_item_comes_out():
    with pytest.raises(ZeroDivisionError):
        heldout.map_on_cores(lambda item: 1 / item, [1, 0, 2], torch.device("cpu"))
