"""Many texts in a forward beside each on its own: the padding changes nothing."""

import pytest
import torch
from small_models import AUX_LAYERS, small_model

from eagle3_utils.acceptance import forward
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.devices import one_torch_thread

TEXTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8], [9, 7, 9, 3, 2, 3, 8, 4]]


@pytest.fixture(scope="module")
def model():
    with one_torch_thread():
        yield small_model()


@pytest.mark.parametrize("tokens_at_once", [1, 12, 4096])  # each alone, two and two, all together
def test_logits_are_those_of_each_text_alone_at_its_last_tokens(model, monkeypatch, tokens_at_once):
    monkeypatch.setattr(forward, "_TOKENS_AT_ONCE", tokens_at_once)
    counts = [2, 1, 4, 3]
    found = {index: logits.clone() for index, logits in forward.logits_of(model, TEXTS, counts)}
    assert sorted(found) == [0, 1, 2, 3]
    for index, (text, count) in enumerate(zip(TEXTS, counts, strict=True)):
        with torch.no_grad():
            alone = model(torch.tensor([text])).logits[0, -count:]
        torch.testing.assert_close(found[index], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_packed_samples_hold_the_models_states_and_supervise_the_output(model):
    prompts = [Prompt("a", "chat", [3, 1, 4]), Prompt("b", "code", [7])]
    batch, other = forward.packed_samples(model, prompts, [[1, 5], [2, 6, 5, 3, 5]], AUX_LAYERS)
    states = model(torch.tensor([[3, 1, 4, 1, 5]]), output_hidden_states=True)
    assert batch.loss_mask.tolist() == [False, False, False, True, True]
    assert batch.final_index.tolist() == [-1, -1, 0, 1, -1]
    torch.testing.assert_close(batch.aux[:, 1], states.hidden_states[2][0])
    torch.testing.assert_close(model.lm_head(batch.final), states.logits[0, 2:4])
    assert (other.sample_ids, other.sources, other.input_ids.tolist()) == (["b"], ["code"], [7, 2, 6, 5, 3, 5])
    alone = forward.packed_samples(model, prompts[:1], [[1, 5]], AUX_LAYERS)[0]
    torch.testing.assert_close(alone.aux, batch.aux)
